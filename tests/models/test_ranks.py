"""Several ranks: what would be wrong there is refused before anything is written or measured."""

from collections.abc import Iterator
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
from hf_kvret.models.ranks import WHOLE, Part, check_split, is_split, part_of
from hf_kvret.replay import graph
from hf_kvret.saved.identity import identity_of
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt

RUN: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}


@pytest.fixture
def group() -> Iterator[int]:
    """A process group of two, of which this process is a rank; the other is not there."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield 2
    distributed.destroy_process_group()


def split(model: Any, names: tuple[str, ...] | None = ("tp",)) -> PreTrainedModel:
    """``model`` with the queries of a layer in shards, as transformers' tensor parallelism."""
    projection: Any = model.model.layers[0].self_attn.q_proj
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
    projection.weight = nn.Parameter(
        distribute_tensor(projection.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    )
    return model  # type: ignore[no-any-return]


def test_an_unnamed_mesh_divides_heads_where_transformers_says_so(group: int, model: Any) -> None:
    """FSDP's own meshes have none either, and each process has all heads there."""
    assert is_split(split(model, None)) and part_of(model) == WHOLE
    model._tp_size = 2
    assert part_of(model) == Part(0, 2)


def test_a_save_is_of_whole_models(group: int, model: PreTrainedModel, tmp_path: Path) -> None:
    """As each of several data parallel processes has (accelerate, lm-eval)."""
    cls, cache = FlatKVCache, FlatKVCache(model.config, **COVERING_OPTIONS)
    model.generate(prompt(1, 100), past_key_values=cache, **RUN)
    cache.save_pretrained(tmp_path)
    assert cls.from_pretrained(tmp_path, model.config, model=model).get_seq_length() == 101
    assert part_of(model) == WHOLE
    assert part_of(split(model)) == Part(0, 2)
    with pytest.raises(ValueError, match="the model is split over processes"):
        cls.from_pretrained(tmp_path, model.config, model=model)
    with pytest.raises(ValueError, match="other heads than this process, which is rank 0 of 2"):
        cache.check_model(model)


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


def test_no_split_model_is_calibrated(group: int, model: PreTrainedModel, tmp_path: Path) -> None:
    assert not is_split(model)
    split(model)
    with pytest.raises(ValueError, match="the model is split over processes"):
        tiny_artifact(model, "a2ats", tmp_path / "out")
    assert not (tmp_path / "out").exists()
