"""``identity`` and ``tokens`` of a crafted cache: what no save writes is refused on load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache, attach
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

from ..saved_files import read_saved, write_saved

OPTIONS: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 4}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = MODELS["llama"].build()
    attach(model)
    return model


@pytest.fixture
def saved(model: PreTrainedModel, tmp_path: Path) -> Path:
    cache = FlatKVCache(model.config, **OPTIONS)
    with torch.no_grad():
        model(prompt(2, 60), past_key_values=cache)
    cache.save_pretrained(tmp_path, model=model)
    return tmp_path


@pytest.mark.parametrize(
    "edit",
    [
        lambda x: x["tokens"].update(passes=[[float("inf"), 1, "x"]]),
        lambda x: x["tokens"].update(passes=[[0, 1]]),
        lambda x: x["tokens"].update(passes=5),
        lambda x: x["tokens"].update(passes=None),
        lambda x: x["tokens"].pop("passes"),
        lambda x: x["identity"].update(facts=1),
        lambda x: x["identity"].update(weights=[3]),
        lambda x: x["identity"].update(weights={}, name=None, facts=[["a"]]),
    ],
)
def test_an_origin_that_no_save_writes_is_refused(
    edit: Callable[[dict[str, Any]], None], saved: Path, model: PreTrainedModel
) -> None:
    content, _ = read_saved(saved)
    edit(content)
    write_saved(saved, content)
    with pytest.raises(ValueError, match=r"is (damaged|corrupt) \(.*save (it|the cache) again"):
        FlatKVCache.from_pretrained(saved, model.config)


@pytest.mark.parametrize("rows", [0, 2])
def test_ids_of_no_token_are_refused(rows: int, saved: Path, model: PreTrainedModel) -> None:
    content, tensors = read_saved(saved)
    tensors["tokens.ids"] = torch.zeros(rows, 0, dtype=torch.int32)
    write_saved(saved, content, tensors)
    with pytest.raises(ValueError, match=r"ids of torch.int32 \[., 0\] for tokens of \[2, 60\]"):
        FlatKVCache.from_pretrained(saved, model.config)
