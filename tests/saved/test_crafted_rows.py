"""Rows that the model can't have are refused when a cache is loaded, not in a later pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import FlatKVCache, LRQKCache, RetrievalCache, attach
from hf_kvret.contracts.schema import check_finite
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

from .saved_files import read_saved, write_saved

Tensors = dict[str, torch.Tensor]
OPTIONS: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 4}


def _saved(model: PreTrainedModel, cls: type[RetrievalCache], folder: Path, **options: Any) -> None:
    cache = cls(model.config, **{**OPTIONS, **options})
    with torch.no_grad():
        for count in (60, 1, 1):
            model(prompt(2, count, salt=count), past_key_values=cache)
    cache.save_pretrained(folder)


def _rows(change: Callable[[torch.Tensor], torch.Tensor], side: str = "") -> Callable[..., Tensors]:
    """Have all keys and values changed, or those of one side."""

    def changed(tensors: Tensors) -> Tensors:
        return {
            name: change(x).clone() if x.ndim == 4 and name.endswith(side) else x
            for name, x in tensors.items()
        }

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_rows(lambda x: x[:, :1]), "of 1 KV heads with 16 numbers, and this model has 2 with 16"),
        (_rows(lambda x: x[..., :8]), "of 2 KV heads with 8 numbers, and this model has 2 with 16"),
        (_rows(lambda x: torch.cat([x, x], -1)), "with 32 numbers, and this model has 2 with 16"),
        (
            _rows(lambda x: x[..., :8], "values"),
            r"pages is float32 .* 32\], not float32 .* 24\]",
        ),
    ],
    ids=["heads", "numbers", "more numbers", "numbers of values"],
)
def test_rows_of_another_form_are_refused(
    llama: PreTrainedModel, tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    _saved(llama, FlatKVCache, tmp_path)
    content, tensors = read_saved(tmp_path)
    write_saved(tmp_path, content, change(tensors))
    with pytest.raises(ValueError, match=message):
        FlatKVCache.from_pretrained(tmp_path, llama.config)


def test_a_model_with_a_kv_head_for_each_query_head_is_served(tmp_path: Path) -> None:
    """Whatever its configuration says: GPT-NeoX does not look at it."""
    model = MODELS["gpt_neox"].build()
    attach(model)
    assert model.config.num_key_value_heads == 2
    _saved(model, FlatKVCache, tmp_path)
    loaded = FlatKVCache.from_pretrained(tmp_path, model.config)
    assert loaded.retrieval_layers[0].kv.window.keys.shape[1] == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("name", ["window.keys", "window.values", "store.pages"])
def test_rows_that_a_later_pass_would_refuse_are_refused(
    llama: PreTrainedModel, tmp_path: Path, name: str, value: float
) -> None:
    _saved(llama, LRQKCache, tmp_path, rank=4)
    content, tensors = read_saved(tmp_path)
    changed = tensors[f"layers.1.{name}"].clone()
    changed.view(-1)[-1] = value
    write_saved(tmp_path, content, {**tensors, f"layers.1.{name}": changed})
    with pytest.raises(ValueError, match=rf"layer 1: {name} has numbers (that are not finite|abo)"):
        LRQKCache.from_pretrained(tmp_path, llama.config)
    write_saved(tmp_path, content, tensors)
    assert LRQKCache.from_pretrained(tmp_path, llama.config).get_seq_length() == 62


def test_states_of_other_layers_are_looked_at_too(tmp_path: Path) -> None:
    model = MODELS["gemma3"].build()
    attach(model)
    _saved(model, LRQKCache, tmp_path, rank=4)
    content, tensors = read_saved(tmp_path)
    number = next(i for i, x in enumerate(content["layers"]) if "Sliding" in x["type"])
    changed = tensors[f"layers.{number}.values"].clone()
    changed[0, 0, 0, 0] = math.nan
    write_saved(tmp_path, content, {**tensors, f"layers.{number}.values": changed})
    with pytest.raises(ValueError, match=f"layer {number}: values has numbers that are not finite"):
        LRQKCache.from_pretrained(tmp_path, model.config)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_number_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[1, 5] = torch.finfo(dtype).max
    check_finite("x", values)
    check_finite("x", values[:, :0])
    for place in (0, 17, 1500, 2999):
        for value in (math.nan, math.inf, -math.inf):
            damaged = values.clone()
            damaged.view(-1)[place] = value
            with pytest.raises(ValueError, match="x has numbers that are not finite"):
                check_finite("x", damaged)
