"""Several ranks: what would be wrong there is refused before anything is written or measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.models.ranks import (
    WHOLE,
    Part,
    check_split,
    group_size,
    is_split,
    part_of,
    place_to_save,
)
from hf_kvret.replay import graph
from hf_kvret.saved.description import checksum
from hf_kvret.saved.identity import identity_of
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS, MODELS
from hf_kvret.testing.scenario import prompt

RUN: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}


@pytest.fixture
def model() -> PreTrainedModel:
    return MODELS["llama"].build()


@pytest.fixture
def saved(model: PreTrainedModel, tmp_path: Path) -> Path:
    """A cache that one process saved."""
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    model.generate(prompt(1, 100), past_key_values=cache, **RUN)
    cache.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of which this process is a rank; the others are not there."""
    size = getattr(request, "param", 2)
    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    yield size
    distributed.destroy_process_group()


def split(model: Any) -> PreTrainedModel:
    """``model`` with the queries of a layer in shards, as transformers' tensor parallelism."""
    projection: Any = model.model.layers[0].self_attn.q_proj
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    projection.weight = nn.Parameter(
        distribute_tensor(projection.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    )
    return model  # type: ignore[no-any-return]


def test_a_mesh_without_a_name_divides_heads_where_transformers_says_so(
    group: int, model: Any
) -> None:
    """FSDP's own meshes have none either, and each process has all heads there."""
    projection = model.model.layers[0].self_attn.q_proj
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(projection.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    projection.weight = nn.Parameter(weight)
    assert is_split(model) and part_of(model) == WHOLE
    model._tp_size = 2
    assert part_of(model) == Part(0, 2)


@pytest.mark.parametrize("group", [1, 2], indirect=True)
def test_a_rank_with_a_whole_model_saves_and_loads(
    group: int, model: PreTrainedModel, tmp_path: Path
) -> None:
    """As in data parallel processes (accelerate, lm-eval)."""
    assert group_size() == group
    cls, cache = FlatKVCache, FlatKVCache(model.config, **COVERING_OPTIONS)
    model.generate(prompt(1, 100), past_key_values=cache, **RUN)
    cache.save_pretrained(tmp_path / "out")
    assert cls.from_pretrained(tmp_path / "out", model.config, model=model).get_seq_length() == 101
    words = r"in a process group of 2 ranks.* pass model="
    with nullcontext() if group == 1 else pytest.raises(ValueError, match=words):
        cls.from_pretrained(tmp_path / "out", model.config)


def test_a_rank_of_a_split_model_loads_its_own_file_alone(
    saved: Path, group: int, model: PreTrainedModel
) -> None:
    assert part_of(model) == WHOLE
    assert part_of(split(model)) == Part(0, 2)
    with pytest.raises(ValueError, match=r"no cache of 2 ranks \(of one process, if any\)"):
        FlatKVCache.from_pretrained(saved, model.config, model=model)


def test_files_of_ranks_are_refused_by_one_process(
    saved: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    """Whether their folder is given, or the folder of one of them."""
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    saved.rename(ranks / "rank-0-of-2")
    for more in ({}, {"model": model}):
        with pytest.raises(ValueError, match="holds the files of 2 ranks"):
            FlatKVCache.from_pretrained(ranks, model.config, **more)
    own = ranks / "rank-0-of-2"
    description = own / "cache.json"
    content = json.loads(description.read_text())
    content["identity"]["facts"]["rank"] = "0 of 2"
    content["checksum"] = checksum(content)
    description.write_text(json.dumps(content))
    for more in ({}, {"model": model}):
        with pytest.raises(ValueError, match="saved by rank 0 of 2, and this is a process with al"):
            FlatKVCache.from_pretrained(own, model.config, **more)


def test_a_folder_has_files_of_one_number_of_ranks(saved: Path, tmp_path: Path) -> None:
    two, four = Part(0, 2), Part(3, 4)
    assert place_to_save(tmp_path / "new", WHOLE) == tmp_path / "new"
    assert place_to_save(tmp_path / "new", two) == tmp_path / "new" / "rank-0-of-2"
    (tmp_path / "new" / "rank-1-of-2").mkdir(parents=True)
    assert place_to_save(tmp_path / "new", two).name == "rank-0-of-2"
    for part in (WHOLE, four):
        with pytest.raises(ValueError, match="holds a cache of 2 ranks, and this one is of"):
            place_to_save(tmp_path / "new", part)
    with pytest.raises(ValueError, match="holds a cache of one process"):
        place_to_save(saved, two)


def test_what_a_rank_holds_is_said_by_layer() -> None:
    facts = Part(1, 2).facts(MODELS["llama"].config())
    assert facts == {"rank": "1 of 2", "rank's KV heads": "1 to 1 of 2"}
    assert WHOLE.facts(MODELS["llama"].config()) == {}
    latent = Part(1, 2).facts(LATENT_MODELS["deepseek_v2"].config())
    assert latent["rank's KV heads"] == "0 to 0 of 1"


def test_a_split_that_no_cache_serves_is_refused(group: int, model: Any) -> None:
    check_split(model)
    model.config.distributed_config = SimpleNamespace(pp_size=2)
    with pytest.raises(ValueError, match=r"spread over 2 processes \(pp_size\)"):
        model.generate(prompt(1, 100), cache_implementation="flat", **RUN)
    del model.config.distributed_config
    model.config.num_key_value_heads = 1
    with pytest.raises(ValueError, match="1 KV heads can't be divided among 2 ranks"):
        check_split(split(model))


def test_steps_of_a_split_model_are_not_replayed(
    group: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "RECORDERS", {"cpu": None})
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    assert graph.why_not(model, cache) is None
    assert "split over processes" in str(graph.why_not(split(model), cache))


def test_weights_in_shards_are_compared_by_their_place(group: int, model: PreTrainedModel) -> None:
    whole = identity_of(model)
    shards = identity_of(split(model))
    name = "layers.0.self_attn.q_proj.weight"
    assert name in whole.weights and f"{name} at 0 of 2" in shards.weights
    assert "rank 0 of 2" in whole.difference(shards)


def test_a_split_model_is_not_calibrated(
    group: int, model: PreTrainedModel, tmp_path: Path
) -> None:
    assert not is_split(model)
    assert is_split(split(model))
    with pytest.raises(ValueError, match="the model is split over processes"):
        tiny_artifact(model, "a2ats", tmp_path / "out")
    assert not (tmp_path / "out").exists()
