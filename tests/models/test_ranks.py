"""Several ranks: what would be wrong there is refused before anything is written or measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_kvret import FlatKVCache, ParisKVCache
from hf_kvret.lab.calibrate.command import run_calibrate
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.lab.evaluate.measurement import Outputs, run_measurement
from hf_kvret.models.ranks import check_one_process, group_size, is_split, launched_ranks
from hf_kvret.testing import COVERING_OPTIONS, MODELS
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


def split(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with the queries of a layer in shards."""
    projection: Any = model.model.layers[0].self_attn.q_proj
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    projection.weight = nn.Parameter(
        distribute_tensor(projection.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    )
    return model


def test_a_group_is_counted(group: int) -> None:
    assert group_size() == launched_ranks() == group


def test_without_a_group_there_is_one_rank() -> None:
    assert group_size() == launched_ranks() == 1
    check_one_process()


@pytest.mark.parametrize("cls", [FlatKVCache, ParisKVCache])
def test_a_rank_saves_nothing(cls: Any, group: int, model: PreTrainedModel, tmp_path: Path) -> None:
    cache = cls(model.config, **COVERING_OPTIONS)
    model.generate(prompt(1, 100), past_key_values=cache, **RUN)
    for more in ({}, {"overwrite": True}, {"model": model}):
        with pytest.raises(ValueError, match="save_pretrained in a process group of 2 ranks"):
            cache.save_pretrained(tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()


def test_a_rank_loads_for_a_whole_model_alone(
    saved: Path, group: int, model: PreTrainedModel
) -> None:
    with pytest.raises(ValueError, match=r"in a process group of 2 ranks.* pass model="):
        FlatKVCache.from_pretrained(saved, model.config)
    loaded = FlatKVCache.from_pretrained(saved, model.config, model=model)
    assert loaded.get_seq_length() == 101
    with pytest.raises(ValueError, match="a rank may hold some of them"):
        FlatKVCache.from_pretrained(saved, model.config, model=split(model))


@pytest.mark.parametrize("group", [1], indirect=True)
def test_a_group_of_one_saves_and_loads(group: int, model: PreTrainedModel, tmp_path: Path) -> None:
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    model.generate(prompt(1, 100), past_key_values=cache, **RUN)
    cache.save_pretrained(tmp_path)
    assert FlatKVCache.from_pretrained(tmp_path, model.config).get_seq_length() == 101


def test_rows_of_some_heads_are_refused_under_a_group(group: int, model: PreTrainedModel) -> None:
    """As in a file that a rank saved when it still could."""
    config = MODELS["llama"].config()
    config.num_key_value_heads = 1
    cache = FlatKVCache(config, **COVERING_OPTIONS)
    LlamaForCausalLM(config).eval().generate(prompt(1, 100), past_key_values=cache, **RUN)
    rows = cache.retrieval_layers[0].state_dict()
    layer = FlatKVCache(model.config, **COVERING_OPTIONS).retrieval_layers[0]
    with pytest.raises(ValueError, match="are of 1 KV heads with 16 numbers, and this model has 2"):
        layer.load_state_dict(rows, torch.device("cpu"))


@pytest.mark.parametrize("method", ["a2ats", "aqua"])
def test_a_split_model_is_not_calibrated(
    method: str, group: int, model: PreTrainedModel, tmp_path: Path
) -> None:
    assert not is_split(model)
    assert is_split(split(model))
    with pytest.raises(ValueError, match="the model is split over processes"):
        tiny_artifact(model, method, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_transformers_split_is_known_by_its_size(model: Any) -> None:
    model._tp_size = 2
    assert is_split(model)
    model._tp_size = 1
    assert not is_split(model)


COMMANDS: dict[str, Any] = {
    "measurement": lambda: run_measurement(None, Outputs()),  # type: ignore[arg-type]
    "calibrate": lambda: run_calibrate(None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_refused_on_one_of_several_ranks(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"one of 4 ranks.* without torchrun"):
        COMMANDS[command]()


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_an_environment_of_one_rank_is_none(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    check_one_process()
