"""Latent attention: the patch of its class, weights that are not plain, rows held once."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import FlatKVCache, LatentKVCache
from hf_kvret.layer.latent import ModuleHeads
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS, MODELS
from hf_kvret.testing.scenario import prompt
from hf_kvret_model_patches import latent

from ..saved.saved_files import read_saved

GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def model() -> PreTrainedModel:
    return LATENT_MODELS["deepseek_v3"].build()


def with_cache(model: PreTrainedModel) -> torch.Tensor:
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    tokens = model.generate(prompt(1, 120), past_key_values=cache, **GREEDY)
    assert all(layer.selected for layer in cache.retrieval_layers)
    return tokens


def test_the_class_is_patched_once_and_put_back(model: PreTrainedModel) -> None:
    attention = type(model.model.layers[0].self_attn)
    # Other models of this class may have been attached in this process.
    latent.restore()
    plain = attention.expand_kv
    expected = model.generate(prompt(1, 120), **GREEDY)
    try:
        hf_kvret.attach(model)
        patched = attention.expand_kv
        hf_kvret.attach(model)
        assert attention.expand_kv is patched and patched.__wrapped__ is plain
        # Without a handle nothing changes.
        hf_kvret.restore(model)
        assert torch.equal(model.generate(prompt(1, 120), **GREEDY), expected)
        assert torch.equal(with_cache(copy.deepcopy(model)), expected)
        hf_kvret.unregister()
        assert attention.expand_kv is plain
    finally:
        hf_kvret.register()


def test_absorbed_queries_score_as_expanded_keys_do(model: PreTrainedModel) -> None:
    module: Any = model.model.layers[0].self_attn
    heads, generator = ModuleHeads(module), torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 3, 24, generator=generator)
    rows = torch.randn(2, 1, 50, 24, generator=generator)
    with torch.no_grad():
        keys, values = heads.expand(rows, rows)
        expected = query @ keys.mT
        torch.testing.assert_close(heads.absorb(query) @ rows.mT, expected, rtol=1e-4, atol=1e-4)
        weights = expected.softmax(-1)
        means = weights @ rows[..., :16]
        torch.testing.assert_close(
            heads.project_values(means), weights @ values, rtol=1e-4, atol=1e-4
        )
    assert heads.expanded_elements(rows, rows) == 4 * (24 + 16)


@pytest.mark.parametrize("questions", [12, 40])
def test_a_question_is_absorbed_or_expanded_as_is_cheaper(
    model: PreTrainedModel, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here 2 R = n + v: absorbing is never dearer. With longer heads it would be, from 24 queries.
    module: Any = model.model.layers[0].self_attn
    assert not ModuleHeads(module).expands(10_000)
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    heads = ModuleHeads(SimpleNamespace(**sizes))
    assert heads.expands(171) and not heads.expands(170)
    monkeypatch.setattr(ModuleHeads, "expands", lambda heads, queries: queries > 24)
    long = [torch.cat([prompt(1, 120), prompt(1, questions)], dim=1)]
    expected = model.generate(long[0], **GREEDY)
    for cache in (FlatKVCache(model.config, **COVERING_OPTIONS), LatentKVCache(model.config)):
        model.generate(prompt(1, 120), past_key_values=cache, max_new_tokens=1)
        cache.crop(120 - cache.get_seq_length())
        assert torch.equal(model.generate(long[0], past_key_values=cache, **GREEDY), expected)


def test_absorbed_attention_needs_latents() -> None:
    config = MODELS["llama"].build().config
    with pytest.raises(ValueError, match=r"llama has no latent attention.*'paris'"):
        LatentKVCache(config)


def test_absorbed_attention_is_called_by_name_and_says_nothing(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    expected = model.generate(prompt(2, 60), **GREEDY)
    with caplog.at_level("INFO", logger="hf_kvret"):
        answer = model.generate(prompt(2, 60), cache_implementation="latent", **GREEDY)
    assert torch.equal(answer, expected)
    assert not caplog.records


def test_a_token_is_held_once(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = FlatKVCache(model.config, **COVERING_OPTIONS, store="host")
    model.generate(prompt(1, 120), past_key_values=cache, **GREEDY)
    (layer, *_), numbers = cache.retrieval_layers, 16 + 8
    window, store = layer.kv.window, layer.kv.store
    assert window.row_dim == numbers and window.values.data_ptr() == window.keys.data_ptr()
    assert store.paged_rows().width == numbers
    assert cache.memory().full_attention == 2 * layer.get_seq_length() * numbers * 4
    cache.save_pretrained(tmp_path)
    names = read_saved(tmp_path)[1]
    assert names["layers.0.store.pages"].shape[-1] == numbers and "layers.0.window.keys" in names
    assert not [name for name in names if name.endswith(("window.values", "store.values"))]
