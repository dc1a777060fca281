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
from hf_kvret.testing.saved import read_saved, write_saved
from hf_kvret.testing.scenario import prompt

OPTIONS: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 4}
_INPUT = {"name": "position_ids", "start": 0, "count": 1, "by_token": True, "sha256": ["x"]}


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


def _first_weights(content: dict[str, Any]) -> Any:
    return content["identity"]["weights"][0]


@pytest.mark.parametrize(
    "edit",
    [
        lambda x: x["tokens"].update(inputs=[{**_INPUT, "start": float("inf")}]),
        lambda x: x["tokens"].update(inputs=[{**_INPUT, "count": -float("inf")}]),
        lambda x: x["tokens"].update(inputs=5),
        lambda x: x["tokens"].update(inputs=None),
        lambda x: _first_weights(x).update(shape=[float("inf")]),
        lambda x: _first_weights(x).update(values=[10**400] * 16),
        lambda x: _first_weights(x).update(values=[[]]),
        lambda x: x["identity"].update(facts=1),
        lambda x: x["identity"].update(adapters=[3]),
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
    tensors["tokens.chain"] = torch.zeros(rows, 0, 32, dtype=torch.uint8)
    write_saved(saved, content, tensors)
    with pytest.raises(ValueError, match=r"token ids of torch.int32 \[., 0\] are not those"):
        FlatKVCache.from_pretrained(saved, model.config)
