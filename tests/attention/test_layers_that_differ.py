"""Heads and head dims by layer: layers that retrieve may differ, also among themselves."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention

from hf_kvret import AquaKVCache, FlatKVCache, LRQKCache, RetrievalCache
from hf_kvret.lab.calibrate.tiny import tiny_artifact
from hf_kvret.models.compatibility import (
    AttentionShape,
    head_dims,
    layer_shapes,
    model_shape,
    retrieval_shapes,
)
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.models import GEMMA4, spread_weights
from hf_kvret.testing.scenario import prompt, ragged

CACHES: dict[str, Callable[..., RetrievalCache]] = {
    "lrqk": LRQKCache,
    "aqua": partial(AquaKVCache, bits=16),
}
RUN: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def gemma4(**changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model("gemma4_text", **{**GEMMA4, **changes})


def unlike(dim: int = 24, kv_heads: int = 1) -> PreTrainedModel:
    """SmolLM3 of three layers that retrieve; the middle one, which has no RoPE, has other heads."""
    model: Any = MODELS["smollm3"].build()
    config = model.config
    other = copy.deepcopy(config)
    other.head_dim, other.num_key_value_heads = dim, kv_heads
    attention = SmolLM3Attention(other, 1)
    attention.config = config
    model.model.layers[1].self_attn = attention
    config.head_dim = 16
    config.per_layer_config = {1: {"head_dim": dim, "num_key_value_heads": kv_heads}}
    spread_weights(model, 1)
    return model.eval()


def test_shapes_are_those_of_each_layer() -> None:
    config = gemma4()
    sliding, full = AttentionShape(4, 2, 16), AttentionShape(4, 1, 32)
    assert layer_shapes(config) == [sliding, full, full]
    assert retrieval_shapes(config) == {1: full, 2: full}
    assert head_dims(config) == [32]
    assert [shape.width for shape in layer_shapes(config)] == [32, 32, 32]
    assert head_dims(unlike().config) == [24, 16]
    assert head_dims(MODELS["llama"].config()) == [16]
    composite = AutoConfig.for_model("gemma4", text_config=GEMMA4, vision_config=None)
    assert layer_shapes(composite) == layer_shapes(config)


def test_a_saved_cache_knows_heads_by_layer(tmp_path: Path) -> None:
    model, ids = MODELS["gemma4"].build(), prompt(1, 40)
    assert model_shape(model.config)["head_dim"] == [16, 32, 32]
    assert model_shape(MODELS["llama"].config())["num_key_value_heads"] == 2
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    model.generate(ids, past_key_values=cache, **RUN)
    cache.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"head_dim\[1\]=32, this model has 64"):
        FlatKVCache.from_pretrained(tmp_path, gemma4(global_head_dim=64))
    with pytest.raises(ValueError, match=r"num_key_value_heads=\[2, 1, 1\], this model has 2"):
        FlatKVCache.from_pretrained(tmp_path, gemma4(num_global_key_value_heads=2))


def test_gemma4_that_attends_to_both_sides_is_refused() -> None:
    with pytest.raises(ValueError, match="attends to both sides"):
        FlatKVCache(gemma4(use_bidirectional_attention="all"))


def test_options_are_checked_by_layer() -> None:
    config = unlike(dim=20).config
    with pytest.raises(ValueError, match="heads of 20 numbers: coded rows need dims that 8"):
        FlatKVCache(config, store="higgs")
    with pytest.raises(ValueError, match="16"):
        LRQKCache(config, rank=20)
    FlatKVCache(config, store="device")
    # Layers that slide hold nothing in codes.
    FlatKVCache(gemma4(head_dim=20), store="higgs")


@pytest.mark.parametrize("method", CACHES)
def test_methods_serve_layers_that_differ(method: str, tmp_path: Path) -> None:
    model = unlike()
    place = {}
    if method == "aqua":
        place["artifact"] = tiny_artifact(model, method, tmp_path / "artifact")
    options: dict[str, Any] = {**COVERING_OPTIONS, **place}
    ids, mask = ragged((61, 40))
    run = {**RUN, "attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **run)
    cache = CACHES[method](model.config, **options)
    found = model.generate(ids, past_key_values=cache, **run)
    assert torch.equal(found.sequences, expected.sequences)
    for got, wanted in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=3e-4)
    assert all(layer["selected"] for layer in cache.stats()["layers"])
    assert [keys.shape[1::2] for keys, _, _ in cache] == [(2, 16), (1, 24), (2, 16)]
    cache.save_pretrained(tmp_path / "saved")
    again = type(cache).from_pretrained(tmp_path / "saved", model.config, **place)
    assert again.get_seq_length() == cache.get_seq_length()
