"""A user's mistakes are refused at once, with the way out; what models and wrappers do is borne."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2VLForConditionalGeneration,
)
from transformers.utils import is_psutil_available

import hf_kvret
from hf_kvret import FlatKVCache, ParisKVCache, attach
from hf_kvret.attention.attention import retrieval_attention
from hf_kvret.attention.masks import base_mask, retrieval_mask
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.models.versions import CACHE_NAME
from hf_kvret.stores import store_names
from hf_kvret.testing import COVERING_OPTIONS, MODELS, REFUSED

from ..saved.saved_files import read_saved, write_saved

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 1.0}
RUN = {"max_new_tokens": 3, "do_sample": False}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def _ids(batch: int = 1, length: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 128, (batch, length), generator=generator)


def _filled(model: PreTrainedModel, batch: int = 1) -> FlatKVCache:
    cache = FlatKVCache(model.config, **SMALL)
    model.generate(_ids(batch), **RUN, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"recent": -1}, "recent=-1 must be at least 1"),
        ({"topk": 5}, "no option 'topk': did you mean 'top_k'?"),
        ({"store": "hots"}, f"store='hots': choose one of {store_names()}"),
        ({"subspace_dim": 5}, "subspace_dim=5: choose 4 or 8"),
    ],
)
def test_bad_options_are_refused_in_every_way_to_give_them(
    llama: PreTrainedModel, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        ParisKVCache(config=llama.config, **options)
    with pytest.raises(ValueError, match=re.escape(words)):
        llama.generate(_ids(), **RUN, cache_implementation="paris", cache_config=options)
    llama.generation_config.cache_config = options
    try:
        with pytest.raises(ValueError, match=re.escape(words)):
            llama.generate(_ids(), **RUN, cache_implementation="paris")
    finally:
        llama.generation_config.cache_config = None


def test_options_of_another_kind_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="FlatKVCache takes a FlatConfig, got ParisConfig"):
        FlatKVCache(llama.config, ParisConfig())
    with pytest.raises(TypeError, match="config must be the model's config, got FlatConfig"):
        FlatKVCache(FlatConfig())
    with pytest.raises(TypeError, match="config must be the model's config, got LlamaForCausalLM"):
        FlatKVCache(llama)
    with pytest.raises(TypeError, match="cache_config must be a dict of options, got list"):
        config = GenerationConfig(cache_implementation="paris", **RUN)
        config.cache_config = ["top_k"]
        llama.generate(_ids(), generation_config=config)


REASONS = {
    "falcon": "computes attention by itself and ignores",
    "bloom": "computes attention by itself and ignores",
    "t5": "is an encoder-decoder",
    "bart": "is an encoder-decoder",
    "mamba": "no full-attention layer",
    "mistral_sliding": "no full-attention layer",
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_served_are_refused_with_the_reason(name: str) -> None:
    model = REFUSED[name]()
    before = getattr(model.config, "_attn_implementation", None)
    passes: list[Any] = []
    model.register_forward_pre_hook(lambda *_: passes.append(name))
    requests: list[Callable[[], Any]] = [lambda: attach(model)]
    for method in ("flat", "paris"):
        run = {**RUN, "cache_implementation": method, "decoder_start_token_id": 0}
        requests.append(partial(model.generate, _ids(), **run))
    if name not in ("falcon", "bloom"):
        requests.append(lambda: FlatKVCache(model.config))
    for request in requests:
        with pytest.raises(ValueError, match=REASONS[name]) as raised:
            request()
        assert "cache_implementation" in str(raised.value), "the message says what to use instead"
        assert not passes, "the model ran before it was refused"
    assert getattr(model.config, "_attn_implementation", None) == before


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_forward_pass_without_our_attention_is_noticed(name: str) -> None:
    model = MODELS[name].build()
    cache = FlatKVCache(model.config, **SMALL)
    first = MODELS[name].full_attention[0]
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=f"layer {first} was given tokens") as raised,
    ):
        model(_ids(), past_key_values=cache)
    assert "hf_kvret.attach(model)" in str(raised.value)
    attach(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="start with a new cache"):
        model(_ids(), past_key_values=cache)
    cache = FlatKVCache(model.config, **SMALL)
    with torch.no_grad():
        model(_ids(), past_key_values=cache)
    assert cache.get_seq_length() == 30


def test_a_cache_filled_by_another_model_is_refused(llama: PreTrainedModel) -> None:
    cache = _filled(llama)
    other = MODELS["qwen3"].build()
    attach(other)
    with torch.no_grad(), pytest.raises(ValueError, match="made for a llama model, this one is"):
        other(_ids(), past_key_values=cache)
    # Without an origin the layers refuse what does not fit.
    cache.forget_origin()
    words = "filled by another model (KV heads 2, key dim 16, value dim 16, torch.float32"
    with torch.no_grad(), pytest.raises(ValueError, match=re.escape(words)) as raised:
        other(_ids(), past_key_values=cache)
    assert "key dim 24" in str(raised.value) and "use a new cache or reset()" in str(raised.value)
    half = MODELS["llama"].build().to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"the new tokens have .*torch\.bfloat16"):
        half.generate(_ids(1, 40), **RUN, past_key_values=cache)


def test_a_cache_reused_at_another_batch_size_is_refused(llama: PreTrainedModel) -> None:
    cache = _filled(llama)
    words = "this cache holds a batch of 1, the new tokens are a batch of 2: use a new cache"
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        llama(_ids(2, 1), past_key_values=cache)
    with torch.no_grad():
        llama(_ids(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 33, "a refused pass leaves the cache as it was"


@pytest.mark.parametrize("filled", [False, True])
def test_padding_on_the_right_is_refused(llama: PreTrainedModel, filled: bool) -> None:
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, -3:] = 0
    if filled:
        request: dict[str, Any] = {"past_key_values": FlatKVCache(llama.config)}
    else:
        request = {"cache_implementation": "flat"}
    with pytest.raises(ValueError, match=r"padded on the right.*padding_side = 'left'"):
        llama.generate(_ids(2), attention_mask=mask, **RUN, **request)


def test_masks_of_another_form_or_length_are_refused(llama: PreTrainedModel) -> None:
    attach(llama)
    mask_4d = torch.zeros(1, 1, 30, 30)
    with torch.no_grad(), pytest.raises(ValueError, match="custom 4D masks are not supported"):
        llama(_ids(), attention_mask=mask_4d, past_key_values=FlatKVCache(llama.config))
    cache = _filled(llama)
    for columns in (1, 32, 34):
        mask = torch.ones(1, columns, dtype=torch.long)
        words = f"attention_mask has {columns} columns, the cache holds 33 tokens"
        with torch.no_grad(), pytest.raises(ValueError, match=words):
            llama(_ids(1, 1), attention_mask=mask, past_key_values=cache.fork())


def test_what_a_retrieval_cache_has_not_is_refused(llama: PreTrainedModel) -> None:
    words = "output_attentions=True: a retrieval cache never forms the attention matrix"
    eager = MODELS["llama"].build()
    eager.set_attn_implementation("eager")
    for request in ({"cache_implementation": "flat"}, {"past_key_values": _filled(eager)}):
        eager.set_attn_implementation("eager")
        with pytest.raises(ValueError, match=words):
            eager.generate(
                _ids(1, 40), **RUN, **request, output_attentions=True, return_dict_in_generate=True
            )
    attach(llama)
    with pytest.raises(RuntimeError, match=r"no gradients: run the model under torch\.no_grad"):
        llama(_ids(), past_key_values=FlatKVCache(llama.config))
    with pytest.raises(ValueError, match="use_cache=False contradicts cache_implementation='flat'"):
        llama.generate(_ids(), **RUN, cache_implementation="flat", use_cache=False)


def test_direct_calls_that_want_weights_are_refused(llama: PreTrainedModel) -> None:
    attach(llama)
    with torch.no_grad(), pytest.raises(ValueError, match="output_attentions=True"):
        llama(_ids(), past_key_values=FlatKVCache(llama.config), output_attentions=True)


BATCHED: dict[str, Any] = {
    "generate_batch": lambda model, config: model.generate_batch(
        inputs=[[5, 6, 7]], generation_config=config, progress_bar=False
    ),
    "init_continuous_batching": lambda model, config: model.init_continuous_batching(config),
    "by name": lambda model, config: model.init_continuous_batching(generation_config=config),
    "context": lambda model, config: model.continuous_batching_context_manager(config).__enter__(),
}


@pytest.mark.parametrize("call", BATCHED)
def test_continuous_batching_refuses_retrieval(call: str) -> None:
    words = r"generate_batch keeps a paged cache.*hf_kvret\.restore\(model\)"
    model = MODELS["llama"].build()
    named = GenerationConfig(cache_implementation="paris", max_new_tokens=2, eos_token_id=-1)
    with pytest.raises(ValueError, match=words):
        BATCHED[call](model, named)
    model.generation_config.cache_implementation = "flat"
    for config in (None, GenerationConfig(max_new_tokens=2, eos_token_id=-1)):
        with pytest.raises(ValueError, match=words):
            BATCHED[call](model, config)
    model.generation_config.cache_implementation = None
    attach(model)
    with pytest.raises(ValueError, match=words):
        BATCHED[call](model, GenerationConfig(max_new_tokens=2, eos_token_id=-1))


def batching_manager(model: PreTrainedModel) -> Any:
    sizes = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=128)
    config = GenerationConfig(max_new_tokens=2, eos_token_id=-1, do_sample=False)
    return model.init_continuous_batching(config, sizes)


def test_a_manager_from_before_a_switch_is_not_started() -> None:
    model = MODELS["llama"].build()
    manager = batching_manager(model)
    attach(model)
    with pytest.raises(ValueError, match="keeps a paged cache"):
        manager.start()


@pytest.mark.skipif(
    CACHE_NAME == "past_key_values" and not is_psutil_available(),
    reason="without psutil transformers before 5.24 takes it that a CPU has no memory",
)
def test_the_manager_of_a_restored_model_serves() -> None:
    model = MODELS["llama"].build()
    manager = batching_manager(model)
    attach(model)
    hf_kvret.restore(model)
    manager.start()
    try:
        name = manager.add_request([5, 6, 7])
        assert manager.get_result(timeout=60).request_id == name
    finally:
        manager.stop(block=True, timeout=60)
        manager.destroy()


def test_another_cache_beside_our_name_is_refused(llama: PreTrainedModel) -> None:
    words = "the cache is a DynamicCache, cache_implementation='paris' asks for another"
    cache = DynamicCache(config=llama.config)
    with pytest.raises(ValueError, match=words):
        llama.generate(_ids(), **RUN, cache_implementation="paris", past_key_values=cache)
    words = "the cache is a FlatKVCache, cache_implementation='paris' asks for another"
    flat = FlatKVCache(llama.config)
    with pytest.raises(ValueError, match=words):
        llama.generate(_ids(), **RUN, cache_implementation="paris", past_key_values=flat)


def test_crops_that_cannot_be_are_refused(llama: PreTrainedModel) -> None:
    cache = _filled(llama)
    with pytest.raises(ValueError, match=r"crop\(3\): pass the number .* as in crop\(-3\)"):
        cache.crop(3)
    with pytest.raises(ValueError, match=r"crop\(-33\): only 32 tokens held"):
        cache.crop(-33)
    cache.crop(0)
    assert cache.get_seq_length() == 32
    cache.crop(-32)
    assert cache.get_seq_length() == 0


def test_forking_in_the_middle_of_a_forward_pass_is_refused(llama: PreTrainedModel) -> None:
    cache = FlatKVCache(llama.config)
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(RuntimeError, match="finish the forward pass first"):
        cache.fork()


def _copy_inputs_of_later_layers(model: PreTrainedModel) -> None:
    """Register hooks that hand every tensor on as a copy, as a device map does."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}

    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ours", [True, False], ids=["retrieval", "dynamic"])
def test_a_device_map_copies_masks_and_changes_nothing(
    llama: PreTrainedModel, ours: bool, padded: bool
) -> None:
    ids, mask = _ids(2, 60), torch.ones(2, 60, dtype=torch.long)
    if padded:
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


@pytest.mark.parametrize("cls", [FlatKVCache, ParisKVCache])
def test_a_cache_filled_in_inference_mode_goes_on_outside(
    llama: PreTrainedModel, cls: type[hf_kvret.RetrievalCache]
) -> None:
    ids = _ids(1, 60)
    expected = llama.generate(ids, **GREEDY)
    attach(llama)
    cache = cls(llama.config, **COVERING_OPTIONS)
    with torch.inference_mode():
        llama(ids[:, :-2], past_key_values=cache)
    assert torch.equal(llama.generate(ids, past_key_values=cache, **GREEDY), expected)


def test_a_refused_call_leaves_the_filled_cache_usable(llama: PreTrainedModel) -> None:
    ids = _ids(1, 60)
    attach(llama)
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        too_long = torch.ones(1, 70, dtype=torch.long)
        with pytest.raises(ValueError, match="attention_mask has 70 columns"):
            llama(ids[:, :1], past_key_values=cache, attention_mask=too_long)
        again = llama(ids[:, :1], past_key_values=cache).logits
        exact = llama(torch.cat([ids, ids[:, :1]], 1), past_key_values=DynamicCache()).logits
    # fp32 sums in another order.
    torch.testing.assert_close(again[:, -1], exact[:, -1], atol=3e-4, rtol=0)


def test_options_that_contradict_the_given_cache_are_refused(llama: PreTrainedModel) -> None:
    cache = FlatKVCache(llama.config, top_k=32)
    with pytest.raises(ValueError, match="asks for top_k=64, past_key_values has 32"):
        llama.generate(_ids(1, 60), past_key_values=cache, cache_config={"top_k": 64}, **GREEDY)
    with pytest.raises(ValueError, match="did you mean 'top_k'"):
        llama.generate(_ids(1, 60), past_key_values=cache, cache_config={"top_kk": 32}, **GREEDY)
    llama.generate(_ids(1, 60), past_key_values=cache, cache_config={"top_k": 32}, **GREEDY)


def test_float64_is_refused_with_the_way_out(llama: PreTrainedModel) -> None:
    cache = FlatKVCache(llama.config)
    key = torch.randn(1, 2, 3, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"float64.*model\.to\(torch\.float32\)"):
        cache.update(key, key, 0)


def test_models_whose_cache_is_not_what_they_attend_to_are_refused() -> None:
    split = LlamaConfig(num_hidden_layers=2)
    split.model_type = "diffllama"
    with pytest.raises(ValueError, match="splits its values after the cache"):
        FlatKVCache(split)


def test_a_saved_cache_that_lost_a_layer_is_refused(llama: PreTrainedModel, tmp_path: Any) -> None:
    cache = FlatKVCache(llama.config, **COVERING_OPTIONS)
    llama.generate(_ids(1, 60), past_key_values=cache, **GREEDY)
    cache.save_pretrained(tmp_path)
    description, tensors = read_saved(tmp_path)
    kept = {name: value for name, value in tensors.items() if not name.startswith("layers.1.")}
    write_saved(tmp_path, description, kept)
    with pytest.raises(ValueError, match="hold different numbers of tokens"):
        FlatKVCache.from_pretrained(tmp_path, llama.config)


def test_chunked_prefill_leaves_a_window_of_working_size() -> None:
    """After a dense phase of 600 tokens the window is as small as after one long prompt."""
    config = MODELS["llama"].config()
    options: dict[str, Any] = {"sink": 2, "recent": 8, "flush": 8, "max_draft": 4}
    sizes = []
    for steps in ([1200], [100] * 12):
        cache = FlatKVCache(config, dense_below=600, **options)
        (layer, *_) = cache.retrieval_layers
        for length in steps:
            keys = torch.randn(1, 2, length, 16)
            layer.update(keys, keys)
            layer.pending_attention = False
            layer.kv.take_prompt(keys, keys, None)
        sizes.append(layer.kv.window.keys.shape[2])
    assert sizes == [2 + 8 + 8 + 4] * 2


def test_restore_puts_back_every_part_of_a_composite_model(tmp_path: Path) -> None:
    MODELS["qwen2_vl"].build().save_pretrained(tmp_path)
    model = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="paris")
    hf_kvret.restore(model)
    configs = (model.config, model.config.text_config, model.config.vision_config)
    assert [each._attn_implementation for each in configs] == ["sdpa"] * 3


@pytest.mark.parametrize(("cache_layers", "model_layers"), [(2, 3), (3, 2)])
def test_a_cache_for_another_number_of_layers_is_refused(
    cache_layers: int, model_layers: int
) -> None:
    configs = [MODELS["llama"].config() for _ in range(2)]
    configs[0].num_hidden_layers, configs[1].num_hidden_layers = cache_layers, model_layers
    model = AutoModelForCausalLM.from_config(configs[1]).eval()
    with pytest.raises(ValueError, match="layers"):
        model.generate(_ids(1, 60), past_key_values=FlatKVCache(configs[0], **COVERING_OPTIONS))
