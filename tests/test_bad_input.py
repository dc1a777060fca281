"""A user's mistakes: each is refused at once, with a message that names the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import is_psutil_available

import hf_kvret
from hf_kvret import (
    FlatKVCache,
    ParisKVCache,
)
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.models.versions import CACHE_NAME
from hf_kvret.stores import store_names
from hf_kvret.testing import COVERING_OPTIONS, MODELS, REFUSED

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 1.0}
RUN = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return MODELS["llama"].build()


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
        ({"top_k": 0}, "top_k=0: a count must be at least 1"),
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
    "deepseek_v32": "of a kind that retrieval does not serve",
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
    requests: list[Callable[[], Any]] = [lambda: hf_kvret.attach(model)]
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
    hf_kvret.attach(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="start with a new cache"):
        model(_ids(), past_key_values=cache)
    cache = FlatKVCache(model.config, **SMALL)
    with torch.no_grad():
        model(_ids(), past_key_values=cache)
    assert cache.get_seq_length() == 30


def test_a_cache_filled_by_another_model_is_refused(llama: PreTrainedModel) -> None:
    cache = _filled(llama)
    other = MODELS["qwen3"].build()
    hf_kvret.attach(other)
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


@pytest.mark.parametrize("given", [False, True])
def test_padding_on_the_right_is_refused(llama: PreTrainedModel, given: bool) -> None:
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, -3:] = 0
    if given:
        request: dict[str, Any] = {"past_key_values": FlatKVCache(llama.config)}
    else:
        request = {"cache_implementation": "flat"}
    with pytest.raises(ValueError, match=r"padded on the right.*padding_side = 'left'"):
        llama.generate(_ids(2), attention_mask=mask, **RUN, **request)


def test_masks_of_another_form_or_length_are_refused(llama: PreTrainedModel) -> None:
    hf_kvret.attach(llama)
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
    hf_kvret.attach(llama)
    with pytest.raises(RuntimeError, match=r"no gradients: run the model under torch\.no_grad"):
        llama(_ids(), past_key_values=FlatKVCache(llama.config))
    with pytest.raises(ValueError, match="use_cache=False contradicts cache_implementation='flat'"):
        llama.generate(_ids(), **RUN, cache_implementation="flat", use_cache=False)


def test_direct_calls_that_want_weights_are_refused(llama: PreTrainedModel) -> None:
    hf_kvret.attach(llama)
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


@pytest.mark.parametrize("way", BATCHED)
def test_continuous_batching_refuses_retrieval(way: str) -> None:
    words = r"generate_batch keeps a paged cache.*hf_kvret\.restore\(model\)"
    model = MODELS["llama"].build()
    named = GenerationConfig(cache_implementation="paris", max_new_tokens=2, eos_token_id=-1)
    with pytest.raises(ValueError, match=words):
        BATCHED[way](model, named)
    model.generation_config.cache_implementation = "flat"
    for config in (None, GenerationConfig(max_new_tokens=2, eos_token_id=-1)):
        with pytest.raises(ValueError, match=words):
            BATCHED[way](model, config)
    model.generation_config.cache_implementation = None
    hf_kvret.attach(model)
    with pytest.raises(ValueError, match=words):
        BATCHED[way](model, GenerationConfig(max_new_tokens=2, eos_token_id=-1))


def batching_manager(model: PreTrainedModel) -> Any:
    sizes = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=128)
    config = GenerationConfig(max_new_tokens=2, eos_token_id=-1, do_sample=False)
    return model.init_continuous_batching(config, sizes)


def test_a_manager_from_before_a_switch_is_not_started() -> None:
    model = MODELS["llama"].build()
    manager = batching_manager(model)
    hf_kvret.attach(model)
    with pytest.raises(ValueError, match="keeps a paged cache"):
        manager.start()


@pytest.mark.skipif(
    CACHE_NAME == "past_key_values" and not is_psutil_available(),
    reason="without psutil transformers before 5.24 takes it that a CPU has no memory",
)
def test_the_manager_of_a_restored_model_serves() -> None:
    model = MODELS["llama"].build()
    manager = batching_manager(model)
    hf_kvret.attach(model)
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
