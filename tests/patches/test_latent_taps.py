"""Taps of latent attention: rows as a cache holds them, queries, and both before RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from hf_kvret import FlatKVCache
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS
from hf_kvret_model_patches.rope import Rope
from hf_kvret_model_patches.rope_check import check_rope
from hf_kvret_model_patches.taps import LayerTokens, tap_attention

RANK, ROTATED = 16, 8
LAYOUTS = {"deepseek_v2": "interleaved", "kimi_linear": "none"}
# Complex numbers, numbers put in another order, queries scaled afterwards.
DEFAULT = ("deepseek_v2", "mistral4")
ALL = [
    name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow)
    for name in LATENT_MODELS
    if name in CONFIG_MAPPING
]


def ids() -> torch.Tensor:
    return torch.arange(10, 58).view(2, 24)


def tapped(model: PreTrainedModel, **options: Any) -> dict[int, LayerTokens]:
    """What each layer was seen to make of two rows of 24 tokens; the newest pass of each."""
    seen: dict[int, LayerTokens] = {}
    with torch.no_grad(), tap_attention(model, seen.__setitem__):
        model(ids(), **options)
    return seen


@pytest.mark.parametrize("name", ALL)
def test_rows_are_those_of_a_cache_with_and_without_one(name: str) -> None:
    model = LATENT_MODELS[name].build()
    with torch.no_grad():
        output = model(ids(), use_cache=True)
        expected = model(ids(), use_cache=False).logits
    alone = tapped(model, use_cache=False)
    cached = tapped(model, use_cache=True)
    assert set(alone) == set(LATENT_MODELS[name].full_attention)
    assert torch.equal(model(ids(), use_cache=False).logits, expected)
    for layer, tokens in alone.items():
        entry = output.past_key_values.layers[layer]
        assert torch.equal(tokens.key, torch.cat([entry.keys, entry.values], dim=-1))
        assert torch.equal(tokens.value, entry.keys)
        assert torch.equal(cached[layer].key, tokens.key)
        assert torch.equal(cached[layer].query, tokens.query)
        assert tokens.latent is not None and tokens.key.shape == (2, 1, 24, RANK + ROTATED)


@pytest.mark.parametrize("name", ALL)
def test_rope_is_undone_on_rows_and_on_absorbed_queries(name: str) -> None:
    model = LATENT_MODELS[name].build()
    ropes = check_rope(model)
    seen, positions = tapped(model, use_cache=False), torch.arange(24)[None]
    for layer, tokens in seen.items():
        rope = ropes[layer]
        own = Rope.of(model.config, layer)
        assert own.layout == rope.layout == LAYOUTS.get(name, "half")
        assert torch.equal(own.inv_freq, rope.inv_freq) and own.last == rope.last
        heads = ModuleHeads(tokens.latent)
        with torch.no_grad():
            query, before = heads.absorb(tokens.query), heads.absorb(tokens.query_before)
        # fp32 angles of at most 23 radians, and sums of 24 products.
        for x, plain in ((tokens.key, tokens.key_before), (query, before)):
            torch.testing.assert_close(rope.unrotate(x, positions), plain, rtol=1e-4, atol=1e-5)
            assert torch.equal(x[..., :RANK], plain[..., :RANK])
            assert rope.layout == "none" or not torch.equal(x, plain)


def test_a_retrieval_cache_hands_latents_on_under_a_tap() -> None:
    model = LATENT_MODELS["deepseek_v3"].build()
    run = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids(), **run)
    seen: list[tuple[int, LayerTokens]] = []
    with tap_attention(model, lambda *call: seen.append(call)):
        cache = FlatKVCache(model.config, **COVERING_OPTIONS)
        assert torch.equal(model.generate(ids(), past_key_values=cache, **run), expected)
    rows = torch.cat([tokens.key for layer, tokens in seen if layer == 1], dim=2)
    assert torch.equal(rows, cache.layers[1].keys[:])


def test_queries_that_were_changed_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LATENT_MODELS["deepseek_v3"].build()
    module = __import__(type(model).__module__, fromlist=["torch"])
    joined = torch.cat

    class Torch:
        """torch, with a rotated query that is not what RoPE gave."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def cat(self, parts: Any, dim: int = 0) -> torch.Tensor:
            result = joined(parts, dim)
            return result + 0.1 if result.shape[-1] == 24 and result.ndim == 4 else result

    monkeypatch.setattr(module, "torch", Torch())
    with pytest.raises(ValueError, match="changes queries or keys between RoPE and attention"):
        tapped(model, use_cache=False)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_last_numbers_turn_as_the_first_would(layout: str) -> None:
    first = Rope(torch.tensor([1.0, 0.1, 0.01]), 1.5, layout)
    last = replace(first, last=True)
    x, positions = torch.randn(2, 3, 5, 16), torch.randint(0, 1000, (2, 5))
    moved = torch.cat([x[..., 10:], x[..., :10]], dim=-1)
    turned = first.rotate(moved, positions)
    expected = torch.cat([turned[..., 6:], turned[..., :6]], dim=-1)
    assert torch.equal(last.rotate(x, positions), expected)
    # Rounding of fp32.
    torch.testing.assert_close(last.unrotate(expected, positions), x, rtol=1e-5, atol=1e-5)
    assert last.settings == {"layout": layout, "attention_factor": 1.5, "last": True}
    assert "last" not in first.settings
