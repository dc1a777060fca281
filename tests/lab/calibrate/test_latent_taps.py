"""Taps of latent attention: rows as a cache holds them, queries, and both before RoPE."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from hf_kvret.lab.calibrate.taps import LayerTokens, before_rope, tap_attention
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.testing import LATENT_MODELS
from hf_kvret_model_patches.rope import Rope

RANK, ROTATED = 16, 8
# Complex numbers, numbers put in another order, queries scaled afterwards.
DEFAULT = ("deepseek_v2", "mistral4")
ALL = [
    name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow)
    for name in LATENT_MODELS
    if name in CONFIG_MAPPING
]
IDS = torch.arange(10, 58).view(2, 24)


def tapped(model: PreTrainedModel) -> dict[int, LayerTokens]:
    """What each layer makes of two rows of 24 tokens."""
    seen: dict[int, LayerTokens] = {}
    with torch.no_grad(), tap_attention(model, seen.__setitem__):
        model(IDS, use_cache=False)
    return seen


@pytest.mark.parametrize("name", ALL)
def test_rows_are_those_of_a_cache(name: str) -> None:
    model = LATENT_MODELS[name].build()
    with torch.no_grad():
        output = model(IDS, use_cache=True)
        expected = model(IDS, use_cache=False).logits
    seen = tapped(model)
    assert set(seen) == set(LATENT_MODELS[name].full_attention)
    assert torch.equal(model(IDS, use_cache=False).logits, expected)
    for layer, tokens in seen.items():
        entry = output.past_key_values.layers[layer]
        assert torch.equal(tokens.key, torch.cat([entry.keys, entry.values], dim=-1))
        assert torch.equal(tokens.value, entry.keys)
        assert tokens.latent is not None and tokens.key.shape == (2, 1, 24, RANK + ROTATED)


@pytest.mark.parametrize("name", ALL)
def test_absorbing_and_unrotating_queries_commute(name: str) -> None:
    model = LATENT_MODELS[name].build()
    for layer, tokens in tapped(model).items():
        rope, heads = Rope.of(model.config, layer), ModuleHeads(tokens.latent)
        with torch.no_grad():
            absorbed = before_rope(heads.absorb(tokens.query), rope)
            before = heads.absorb(before_rope(tokens.query, rope))
        # Sums of 24 products in fp32.
        torch.testing.assert_close(absorbed, before, rtol=1e-4, atol=1e-5)
        row = before_rope(tokens.key, rope)
        assert torch.equal(row[..., :RANK], tokens.key[..., :RANK])
        assert rope.layout == "none" or not torch.equal(row, tokens.key)
