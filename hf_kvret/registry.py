"""Registration with transformers: method names, attention functions, and attached models."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.attention.attention import retrieval_attention
from hf_kvret.attention.base_attention import OUR_NAMES, forget_base, record_base, recorded_base
from hf_kvret.attention.cache_use import check_end, check_foreign, check_pass, keep_cache
from hf_kvret.attention.masks import retrieval_mask
from hf_kvret.attention.model_state import (
    keep_state,
    note_prepared,
    release_state,
    state_of_call,
)
from hf_kvret.attention.prompt_check import check_origin, unwatch, watch
from hf_kvret.attention.prompt_chunks import chunk_prompt, drafts, forget_chunk
from hf_kvret.attention.requests import (
    Request,
    check_length,
    check_prompt_form,
    check_prompt_rows,
    current_request,
    is_served,
    request,
    tell_dense,
    warn_of_top_k,
)
from hf_kvret.cache import RetrievalCache
from hf_kvret.layer.layer import HANDLE
from hf_kvret.methods.a2ats import A2ATSCache
from hf_kvret.methods.aqua import AquaKVCache
from hf_kvret.methods.ctkvr import CTkvrCache
from hf_kvret.methods.flat import FlatKVCache
from hf_kvret.methods.h2o import H2OCache
from hf_kvret.methods.latent import LatentKVCache
from hf_kvret.methods.lrqk import LRQKCache
from hf_kvret.methods.paris import ParisKVCache
from hf_kvret.models.compatibility import check_model, model_layers, text_key
from hf_kvret.models.versions import CACHE_NAME, cache_argument, name_cache
from hf_kvret.replay import DecodeGraph
from hf_kvret_model_patches import decode_graph, generation, latent, mappings, passes

# The attention implementation that `generate` switches a model to. A model loaded with a method's
# name as its attention implementation uses that method's cache by default.
ATTENTION_NAME = "hf_kvret"

BUILT_IN: tuple[type[RetrievalCache], ...] = (
    FlatKVCache,
    ParisKVCache,
    LRQKCache,
    CTkvrCache,
    A2ATSCache,
    AquaKVCache,
    H2OCache,
    LatentKVCache,
)

_methods: dict[str, type[RetrievalCache]] = {}
_attached: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
# Held while a call checks a model's attention and switches or restores it.
_attention_lock = threading.RLock()


def register(*cache_classes: type[RetrievalCache]) -> None:
    """Make methods known to transformers, as ``cache_implementation`` and attention names.

    Importing hf_kvret registers its own; call it with a class of yours, or with nothing to
    register ours again after ``unregister()``. Doing it twice is harmless.

    Raises:
        ValueError: the name belongs to transformers or to another class.
    """
    classes = cache_classes or BUILT_IN
    for cls in classes:
        owner = _methods.get(cls.name)
        theirs = generation.foreign_names() | mappings.foreign_names() | {"eager"}
        is_taken = cls.name == ATTENTION_NAME or (cls.name in theirs and owner is None)
        if is_taken or owner not in (None, cls):
            raise ValueError(f"the name {cls.name!r} is taken: choose another for {cls.__name__}")
    _methods.update({cls.name: cls for cls in classes})
    for name in (ATTENTION_NAME, *_methods):
        mappings.add(name, retrieval_attention, retrieval_mask)
        OUR_NAMES.add(name)
    generation.apply(tuple(_methods), _prepare_cache, _refuse_batch, _around_generate, name_cache)
    decode_graph.apply(_decode_call)
    passes.apply(keep_cache, check_pass)


def unregister() -> None:
    """Undo ``register`` and put every switched model back. Doing it twice is harmless.

    What other libraries wrapped around the same functions of transformers since, and names that
    they added, stay.
    """
    for model in list(_attached):
        restore(model)
    generation.restore()
    decode_graph.restore()
    passes.restore()
    latent.restore()
    for name in (ATTENTION_NAME, *_methods):
        mappings.remove(name)
    _methods.clear()


def registered_methods() -> dict[str, type[RetrievalCache]]:
    """Registered methods by name."""
    return dict(_methods)


def attach(model: PreTrainedModel) -> None:
    """Switch ``model``'s text attention to ours, as ``generate`` does by itself.

    Needed before calling ``model(...)`` directly with a retrieval cache. Layers without one go on
    with the attention that the model had; ``restore(model)`` puts it back.

    Raises:
        ValueError: a model that a retrieval cache cannot serve, with the reason.
    """
    check_model(model)
    latent.apply(model, _is_handle)
    text = model.config.get_text_config(decoder=True)
    _attached.add(model)
    watch(model)
    keep_state(model)
    if text._attn_implementation in OUR_NAMES:
        return
    record_base(text, text._attn_implementation)
    if text is model.config:
        model.set_attn_implementation(ATTENTION_NAME)
    else:
        model.set_attn_implementation({text_key(model.config): ATTENTION_NAME})
    if text._attn_implementation != ATTENTION_NAME:
        restore(model)
        raise ValueError(
            f"{type(model).__name__} did not take the attention {ATTENTION_NAME!r}: use "
            "cache_implementation='dynamic'"
        )


def _is_handle(latents: torch.Tensor) -> bool:
    return getattr(latents, HANDLE, None) is not None


def restore(model: PreTrainedModel) -> None:
    """Give ``model`` back the attention it had. Harmless on a model that was never switched."""
    supports = getattr(model, "_supports_sdpa", False)
    text = model.config.get_text_config(decoder=True)
    parts = [getattr(model.config, key, None) for key in model.config.sub_configs]
    for config in (text, *filter(None, parts), model.config):
        if config._attn_implementation in OUR_NAMES:
            base = recorded_base(config) or ("sdpa" if supports else "eager")
            config._attn_implementation = {"": base}
        forget_base(config)
    unwatch(model)
    release_state(model)
    _attached.discard(model)


@contextmanager
def _around_generate(
    model: PreTrainedModel, arguments: dict[str, Any]
) -> Iterator[Callable[[Any], None]]:
    """Context of a call of ``generate``; if it fails, the attention it switched is restored.

    Yields what is to be called with its result.
    """
    failed = True
    with request(model, arguments) as call, state_of_call(call):
        cache = cache_argument(arguments)
        retrieves, held = _retrieves(call), 0
        if retrieves:
            held = 0 if cache is None else cache.get_seq_length()
            check_prompt_form(call, held)
        try:
            yield partial(check_end, call)
            if retrieves and isinstance(arguments.get("custom_generate"), str):
                check_foreign(call, held)
            failed, call.has_retrieved = False, call.cache is not None
        finally:
            cache, call.cache = call.cache, None
            # A call in another thread may still use the attention that this one switched.
            with _attention_lock:
                if failed and call.switched and not is_served(model):
                    restore(model)
    if cache is not None:
        tell_dense(cache)


def _retrieves(call: Request) -> bool:
    """Whether ``call`` asks for a retrieval cache, as far as its own arguments and names tell."""
    cache = cache_argument(call.arguments)
    if cache is not None:
        return isinstance(cache, RetrievalCache)
    names = [call.arguments.get("cache_implementation"), call.configured("cache_implementation")]
    names += [getattr(call.model.generation_config, "cache_implementation", None)]
    return next(filter(None, names), None) in _methods and not call.configured("is_assistant")


def _prepare_cache(
    model: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any]
) -> bool:
    """Hook of ``generate`` before it makes a cache; True if it made the cache.

    Sets the cache in ``model_kwargs`` if a retrieval cache is selected by name, and switches
    the model's attention if a retrieval cache is used.
    """
    call = current_request(model)
    note_prepared(call)
    name = generation_config.cache_implementation
    caller_cache = model_kwargs.get(CACHE_NAME)
    if generation_config.is_assistant:
        # `generate` passes the main model's options on to a draft model, which has its own cache.
        if name in _methods:
            generation_config.cache_implementation = generation_config.cache_config = None
        forget_chunk(generation_config)
        return False
    if isinstance(caller_cache, RetrievalCache):
        _check_layers(model, caller_cache)
        if name is not None and name != caller_cache.name:
            raise ValueError(
                f"the cache is a {type(caller_cache).__name__}, "
                f"cache_implementation={name!r} asks for another cache: pass one of the two"
            )
        _check_options(caller_cache, generation_config.cache_config or {}, model.config)
        generation_config.cache_implementation = None
        check_length(call, caller_cache)
        _serve(call, caller_cache, generation_config, model_kwargs)
        return False
    if caller_cache is not None and name in _methods:
        raise ValueError(
            f"the cache is a {type(caller_cache).__name__}, cache_implementation={name!r} "
            f"asks for a {_methods[name].__name__}: pass one of the two"
        )
    if caller_cache is None and name is None and generation_config.use_cache is not False:
        name = model.config.get_text_config(decoder=True)._attn_implementation
    if caller_cache is not None or name not in _methods:
        _refuse_unread(call, generation_config, caller_cache)
        return False
    check_model(model)
    options = generation_config.cache_config or {}
    if not isinstance(options, dict):
        raise TypeError(f"cache_config must be a dict of options, got {type(options).__name__}")
    cache = _methods[name](model.config, **options)
    _serve(call, cache, generation_config, model_kwargs)
    model_kwargs[CACHE_NAME] = cache
    return True


def _serve(
    call: Request,
    cache: RetrievalCache,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> None:
    """Prepare ``call`` to use ``cache``: checks, attention, and chunks of the prompt."""
    model = call.model
    caller_cache = cache_argument(call.arguments) is cache
    given = "the cache" if caller_cache else f"cache_implementation={cache.name!r}"
    _check_use_cache(call, generation_config, given)
    _check_request(generation_config)
    check_prompt_rows(call, cache.get_seq_length(), model_kwargs.get("attention_mask"))
    cache.check_model(model)
    outlives = caller_cache or generation_config.return_dict_in_generate
    drafting = drafts(generation_config) or call.arguments.get("assistant_model") is not None
    if cache.get_seq_length() and drafting:
        raise ValueError(
            "assisted decoding of transformers reads the whole prompt again, also the "
            f"{cache.get_seq_length()} tokens that past_key_values holds: leave out "
            "assistant_model and prompt_lookup_num_tokens for this call, or begin anew with "
            "cache.reset()"
        )
    check_origin(call, cache, outlives, model_kwargs.get("attention_mask"))
    warn_of_top_k(call, cache.name, generation_config.do_sample is True)
    text = model.config.get_text_config(decoder=True)
    with _attention_lock:
        call.switched = text._attn_implementation not in OUR_NAMES
        call.cache, call.start_len = cache, cache.get_seq_length()
        attach(model)
    chunk_prompt(model, cache, generation_config, model_kwargs)


def _check_use_cache(call: Request, generation_config: Any, given: str) -> None:
    """ValueError for ``use_cache=False``, with which each pass would append the whole text."""
    if generation_config.use_cache is False:
        remedy = (
            "drop one"
            if call.gives("use_cache")
            else "the model's generation_config says it, so pass use_cache=True"
        )
        raise ValueError(f"use_cache=False contradicts {given}: {remedy}")


def _refuse_unread(call: Request, generation_config: Any, caller_cache: Any) -> None:
    """ValueError for a ``cache_config`` of this call that no cache would read."""
    options = generation_config.cache_config
    if not options or generation_config.cache_implementation is not None:
        return
    if not call.gives("cache_config"):
        # The model's default, for calls that name a cache_implementation.
        return
    reason = (
        "no cache was asked for"
        if caller_cache is None
        else f"the cache is a {type(caller_cache).__name__}"
    )
    raise ValueError(
        f"cache_config={options!r}, but {reason}, so nothing would read it: name the cache that it "
        f"is for with cache_implementation, one of {', '.join(_methods)}"
    )


def _decode_call(
    model: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any]
) -> DecodeGraph | None:
    """The function that ``generate`` calls in its loop: a ``DecodeGraph``; None for the model."""
    cache = model_kwargs.get(CACHE_NAME)
    if not isinstance(cache, RetrievalCache):
        return None
    if generation_config.disable_compile or generation_config.compile_config is not None:
        # transformers itself reports that a requested compile is not possible.
        return None
    step = DecodeGraph(model, cache)
    return None if step.reason else step


def _check_layers(model: PreTrainedModel, cache: RetrievalCache) -> None:
    """ValueError for a cache made for a model with another number of layers."""
    count, model_count = len(cache.layers), len(model_layers(model.config))
    if count != model_count:
        raise ValueError(
            f"past_key_values was made for a model of {count} layers, {type(model).__name__} has "
            f"{model_count}: make it with config=model.config"
        )


def _check_options(
    cache: RetrievalCache, options: dict[str, Any], config: PreTrainedConfig
) -> None:
    """ValueError if ``cache_config`` contradicts the options of the cache passed with it."""
    target = cache.options_for(cache.options.replace(**options), config) if options else None
    for name in options:
        current = getattr(cache.options, name)
        if current != getattr(target, name):
            raise ValueError(
                f"cache_config asks for {name}={options[name]!r}, past_key_values has {current!r}: "
                f"pass {name} to the cache, or drop it from cache_config"
            )


def _refuse_batch(model: PreTrainedModel, generation_config: Any) -> None:
    """ValueError for continuous batching, which has a paged cache of its own and can't use ours."""
    # As in `generate`, what the caller's config leaves open is the model's.
    configs = (generation_config, model.generation_config)
    names = {getattr(config, "cache_implementation", None) for config in configs}
    text = model.config.get_text_config(decoder=True)
    if names & _methods.keys() or text._attn_implementation in OUR_NAMES:
        raise ValueError(
            "continuous batching by init_continuous_batching or generate_batch keeps a paged cache "
            "of its own, which retrieval does not serve: call hf_kvret.restore(model) first and "
            "leave cache_implementation out, or use generate (of transformers serve: leave out "
            "--continuous-batching)"
        )


def _check_request(generation_config: Any) -> None:
    """Refuse what a retrieval cache cannot do, before the first token."""
    if generation_config.output_attentions:
        raise ValueError(
            "output_attentions=True: a retrieval cache never forms the attention matrix; drop the "
            "argument or use cache_implementation='dynamic'"
        )
