"""A user's mistakes are refused at once, with the way out; what models and wrappers do is borne."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, Qwen2VLForConditionalGeneration

import hf_kvret
from hf_kvret import FlatKVCache, attach
from hf_kvret.attention.attention import retrieval_attention
from hf_kvret.attention.masks import base_mask, retrieval_mask
from hf_kvret.testing import COVERING_OPTIONS, MODELS
from hf_kvret.testing.scenario import prompt

RUN = {"max_new_tokens": 3, "do_sample": False}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def _filled(model: PreTrainedModel, batch: int = 1) -> FlatKVCache:
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    model.generate(prompt(batch, 30), **RUN, past_key_values=cache)
    return cache


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_forward_pass_without_our_attention_is_noticed(name: str) -> None:
    model = MODELS[name].build()
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    first = MODELS[name].full_attention[0]
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=f"layer {first} was given tokens") as raised,
    ):
        model(prompt(1, 30), past_key_values=cache)
    assert "hf_kvret.attach(model)" in str(raised.value)
    attach(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="start with a new cache"):
        model(prompt(1, 30), past_key_values=cache)
    cache = FlatKVCache(model.config, **COVERING_OPTIONS)
    with torch.no_grad():
        model(prompt(1, 30), past_key_values=cache)
    assert cache.get_seq_length() == 30


def test_a_cache_filled_by_another_model_is_refused(llama: PreTrainedModel) -> None:
    cache = _filled(llama)
    other = MODELS["qwen3"].build()
    attach(other)
    with torch.no_grad(), pytest.raises(ValueError, match="made for model_type=llama, this"):
        other(prompt(1, 30), past_key_values=cache)
    # Without an origin the layers refuse what does not fit.
    cache.forget_origin()
    words = "filled by another model (KV heads 2, key dim 16, value dim 16, torch.float32"
    with torch.no_grad(), pytest.raises(ValueError, match=re.escape(words)) as raised:
        other(prompt(1, 30), past_key_values=cache)
    assert "key dim 24" in str(raised.value) and "use a new cache or reset()" in str(raised.value)
    half = MODELS["llama"].build().to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"the new tokens have .*torch\.bfloat16"):
        half.generate(prompt(1, 40), **RUN, past_key_values=cache)


@pytest.mark.parametrize(
    ("layer", "dtype", "words"),
    [
        (2, torch.float32, "layer 2 of the model, but this cache was made for 2"),
        (0, torch.float64, r"float64.*model\.to\(torch\.float32\)"),
    ],
)
def test_another_layer_or_dtype_is_refused(layer: int, dtype: torch.dtype, words: str) -> None:
    cache, rows = FlatKVCache(MODELS["llama"].config()), torch.randn(1, 2, 3, 16, dtype=dtype)
    with pytest.raises(ValueError, match=words):
        cache.update(rows, rows, layer)


def test_a_cache_reused_at_another_batch_size_is_refused(llama: PreTrainedModel) -> None:
    cache = _filled(llama)
    words = "this cache holds a batch of 1, the new tokens are a batch of 2: use a new cache"
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        llama(prompt(2, 1), past_key_values=cache)
    with torch.no_grad():
        llama(prompt(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 33, "a refused pass leaves the cache as it was"


def test_gradients_are_refused(llama: PreTrainedModel) -> None:
    attach(llama)
    with pytest.raises(RuntimeError, match=r"no gradients: run the model under torch\.no_grad"):
        llama(prompt(1, 30), past_key_values=FlatKVCache(llama.config))


def test_crops_that_cannot_be_are_refused(llama: PreTrainedModel) -> None:
    cache = _filled(llama)
    refusals = {3: r"crop\(3\): .* as in crop\(-3\)", -33: r"crop\(-33\): only 32 tokens held"}
    for count, words in {**refusals, -2.5: "as an integer"}.items():
        with pytest.raises((TypeError, ValueError), match=words):
            cache.crop(count)  # type: ignore[arg-type]
    for count, left in ((0, 32), (-32, 0)):
        cache.crop(count)
        assert cache.get_seq_length() == left


def _copy_inputs_of_later_layers(model: PreTrainedModel) -> None:
    """Register hooks that hand every tensor on as a copy, as a device map does."""

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.clone().to(value.dtype, copy=True)

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}

    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("ours", [True, False], ids=["retrieval", "dynamic"])
def test_a_device_map_copies_masks_and_changes_nothing(llama: PreTrainedModel, ours: bool) -> None:
    ids, mask = prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :13] = 0
    expected = llama.generate(ids, attention_mask=mask, **GREEDY)
    attach(llama)
    _copy_inputs_of_later_layers(llama)
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS) if ours else DynamicCache()
    result = llama.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(result, expected)


def test_a_mask_that_lost_its_meaning_is_never_read_as_another() -> None:
    with torch._C.DisableTorchFunctionSubclass():
        bare = retrieval_mask(batch_size=2, q_length=5, kv_length=5).as_subclass(torch.Tensor)
    with pytest.raises(ValueError, match=r"hf_kvret\.restore\(model\)"):
        base_mask(bare, "sdpa", torch.device("cpu"))


def test_values_that_change_after_the_cache_are_refused(llama: PreTrainedModel) -> None:
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    key, value = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    handle, _ = cache.update(key, value, 0)
    module = llama.model.layers[0].self_attn
    with pytest.raises(ValueError, match="changes keys or values between its cache"):
        retrieval_attention(module, torch.randn(1, 4, 9, 16), handle, value * 2, None)


def test_a_refused_call_leaves_the_filled_cache_usable(llama: PreTrainedModel) -> None:
    ids = prompt(1, 60)
    attach(llama)
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        for columns in (60, 70):
            mask = torch.ones(1, columns, dtype=torch.long)
            with pytest.raises(ValueError, match=f"attention_mask has {columns} columns"):
                llama(ids[:, :1], past_key_values=cache, attention_mask=mask)
        again = llama(ids[:, :1], past_key_values=cache).logits
        exact = llama(torch.cat([ids, ids[:, :1]], 1), past_key_values=DynamicCache()).logits
    # fp32 sums in another order.
    torch.testing.assert_close(again[:, -1], exact[:, -1], atol=3e-4, rtol=0)


def test_restore_puts_back_every_part_of_a_composite_model(tmp_path: Path) -> None:
    MODELS["qwen2_vl"].build().save_pretrained(tmp_path)
    model = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="paris")
    hf_kvret.restore(model)
    configs = (model.config, model.config.text_config, model.config.vision_config)
    assert [each._attn_implementation for each in configs] == ["sdpa"] * 3
