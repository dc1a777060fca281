"""Taps: they see exactly what the layers made, change nothing, and leave nothing behind."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AttentionInterface

from hf_kvret.lab.calibrate.taps import LayerTokens, before_rope, tap_attention
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.testing import LATENT_MODELS, MODELS, REFUSED, SHARED_MODELS
from hf_kvret_model_patches.rope import Rope

ATTENTION = {key: {0, 1, 2} for key in ("gemma2", "gemma3", "gemma4", "gpt_oss", "exaone4")}
PROMPT = torch.arange(10, 24).view(2, 7)


def tapped(model: Any, ids: torch.Tensor = PROMPT) -> dict[int, LayerTokens]:
    seen: dict[int, LayerTokens] = {}
    with torch.no_grad(), tap_attention(model, seen.__setitem__):
        model(ids, use_cache=False)
    return seen


def hooks(model: Any) -> list[Any]:
    """Everything that a tap replaces while it is open."""
    modules = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return [AttentionInterface.get_interface, *modules]


@pytest.mark.parametrize("name", MODELS)
def test_taps_see_what_a_cache_holds_and_change_nothing(name: str) -> None:
    model = MODELS[name].build()
    before = hooks(model)
    calls: list[tuple[int, LayerTokens]] = []
    with torch.no_grad():
        output = model(PROMPT, use_cache=True)
        expected = model(PROMPT, use_cache=False).logits
        with tap_attention(model, lambda *call: calls.append(call)):
            assert torch.equal(model(PROMPT, use_cache=False).logits, expected)
    assert hooks(model) == before
    layers = ATTENTION.get(name, set(MODELS[name].full_attention))
    assert [layer for layer, _ in calls] == sorted(layers)
    for layer, tokens in calls:
        if layer in MODELS[name].full_attention:
            held = output.past_key_values.layers[layer]
            torch.testing.assert_close(tokens.key, held.keys)
            torch.testing.assert_close(tokens.value, held.values)
            assert tokens.query.shape[::2] == tokens.key.shape[::2]


def test_tokens_before_rope_are_those_of_norm_and_projection() -> None:
    model = MODELS["qwen3"].build()
    tokens = tapped(model)[0]
    attention, block = model.model.layers[0].self_attn, model.model.layers[0]
    hidden = block.input_layernorm(model.model.embed_tokens(PROMPT))
    for x, norm, projection in (
        (tokens.query, attention.q_norm, attention.q_proj),
        (tokens.key, attention.k_norm, attention.k_proj),
    ):
        expected = norm(projection(hidden).view(2, 7, -1, attention.head_dim)).transpose(1, 2)
        # Rotated and turned back, which rounds.
        torch.testing.assert_close(
            before_rope(x, Rope.of(model.config, 0)), expected, rtol=1e-4, atol=1e-5
        )


def test_nothing_stays_after_errors(model: Any) -> None:
    before = hooks(model)

    def fail(layer: int, tokens: LayerTokens) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), tap_attention(model, fail):
        model(PROMPT, use_cache=False)
    assert hooks(model) == before
    with pytest.raises(IndexError):
        tapped(model, torch.tensor([[5, 1000]]))
    assert hooks(model) == before


def test_layers_with_keys_of_another_are_not_seen() -> None:
    assert tapped(SHARED_MODELS["gemma4_shared"].build()).keys() == {0, 1}


@pytest.mark.parametrize("name", ["falcon", "mamba"])
def test_models_that_cant_be_seen_are_refused_before_anything_is_patched(name: str) -> None:
    model = REFUSED[name]()
    before = hooks(model)
    with pytest.raises(ValueError, match="registered attention functions"):
        tap_attention(model, dict[int, LayerTokens]().__setitem__).__enter__()
    assert hooks(model) == before


def test_a_pass_that_reads_a_cache_is_refused(model: Any) -> None:
    cache = model(PROMPT, use_cache=True).past_key_values
    with (
        pytest.raises(ValueError, match=r"attends to 9 keys with 2 queries: .* use_cache=False"),
        tap_attention(model, dict[int, LayerTokens]().__setitem__),
    ):
        model(PROMPT[:, :2], past_key_values=cache)


RANK, ROTATED = 16, 8
# Complex numbers, numbers put in another order, queries scaled afterwards.
USUAL_LATENT = ("deepseek_v2", "mistral4")
LATENT = [
    name if name in USUAL_LATENT else pytest.param(name, marks=pytest.mark.slow)
    for name in LATENT_MODELS
    if name in CONFIG_MAPPING
]


@pytest.mark.parametrize("name", LATENT)
def test_latent_rows_are_those_of_a_cache_and_their_queries_can_be_absorbed(name: str) -> None:
    model = LATENT_MODELS[name].build()
    with torch.no_grad():
        output = model(PROMPT, use_cache=True)
    seen = tapped(model)
    assert set(seen) == set(LATENT_MODELS[name].full_attention)
    for layer, tokens in seen.items():
        entry = output.past_key_values.layers[layer]
        assert torch.equal(tokens.key, torch.cat([entry.keys, entry.values], dim=-1))
        assert torch.equal(tokens.value, entry.keys)
        assert tokens.latent is not None and tokens.key.shape == (2, 1, 7, RANK + ROTATED)
        rope, heads = Rope.of(model.config, layer), ModuleHeads(tokens.latent)
        with torch.no_grad():
            absorbed = before_rope(heads.absorb(tokens.query), rope)
            before = heads.absorb(before_rope(tokens.query, rope))
        # Sums of products in fp32.
        torch.testing.assert_close(absorbed, before, rtol=1e-4, atol=1e-5)
        row = before_rope(tokens.key, rope)
        assert torch.equal(row[..., :RANK], tokens.key[..., :RANK])
        assert rope.layout == "none" or not torch.equal(row, tokens.key)
