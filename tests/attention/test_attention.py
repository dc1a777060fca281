"""The registered function: long prompts block by block, and what it refuses to pass over."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_kvret
from hf_kvret import FlatKVCache, RetrievalCache
from hf_kvret.attention import attention
from hf_kvret.attention.attention import retrieval_attention
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt, ragged


@pytest.fixture
def blocks(watch: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Makes every matrix too large for the base; lists the shapes of block-wise prompts."""
    monkeypatch.setattr(attention, "_DENSE_ELEMENTS", 1)
    return watch(attention, "prompt_attention", lambda query, *_, **__: tuple(query.shape))


@pytest.mark.parametrize(
    ("name", "base"), [("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")]
)
def test_long_prompts_go_in_blocks(name: str, base: str, blocks: list[tuple[int, ...]]) -> None:
    model = MODELS[name].build()
    model.set_attn_implementation(base)
    ids, mask = ragged((40, 29, 1))
    results = []
    with torch.no_grad():
        ours = FlatKVCache(model.config, **COVERING_OPTIONS)
        for cache in (DynamicCache(config=model.config), ours):
            logits = model(ids, attention_mask=mask, past_key_values=cache).logits
            results.append(logits[mask.bool()])
            hf_kvret.attach(model)
    assert len(blocks) == len(MODELS[name].full_attention)
    # Two fp32 orders of the same sums, through three layers with logits around 10.
    torch.testing.assert_close(*results, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_without_padding_the_fastest_attention_takes_a_prompt(
    compiled: bool, blocks: list[tuple[int, ...]], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is sdpa's own, or on a CPU the compiled library."""
    monkeypatch.setattr(attention, "compiled", lambda query: compiled)
    hf_kvret.attach(model)
    with torch.no_grad():
        model(prompt(1, 40), past_key_values=FlatKVCache(model.config, **COVERING_OPTIONS))
    assert len(blocks) == compiled * len(MODELS["llama"].full_attention)


def _call(layer_cache: RetrievalCache, **keywords: Any) -> Any:
    """The attention function on a layer that was given ten new tokens."""
    key, value = torch.randn(1, 2, 10, 16), torch.randn(1, 2, 10, 16)
    key, value = layer_cache.update(key, value, 0)
    module = MODELS["llama"].build().model.layers[0].self_attn
    return retrieval_attention(module, torch.randn(1, 4, 10, 16), key, value, None, **keywords)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"position_bias": torch.zeros(1)}, "attention was called with position_bias=Tensor"),
        ({"output_attentions": True}, "output_attentions=True: a retrieval cache never forms"),
        ({"sliding_window": 16}, "sliding_window=16 on a layer that the cache holds as full"),
        ({"dropout": 0.1}, "dropout=0.1: put the model in eval mode"),
    ],
)
def test_a_keyword_that_changes_attention_is_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _call(FlatKVCache(MODELS["llama"].config(), **COVERING_OPTIONS), **keywords)


def test_a_keyword_that_is_none_or_harmless_passes() -> None:
    cache = FlatKVCache(MODELS["llama"].config(), **COVERING_OPTIONS)
    out, weights = _call(cache, position_bias=None, position_ids=torch.arange(10), dropout=0.0)
    assert out.shape == (1, 10, 4, 16) and out.is_contiguous() and weights is None
