"""Registration with transformers: method names, attention functions, and attached models."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.attention.attention import retrieval_attention
from hf_kvret.attention.base_attention import OUR_NAMES, forget_base, record_base, recorded_base
from hf_kvret.attention.call_checks import (
    check_call,
    check_end,
    check_foreign,
    check_one_cache,
    check_options_are_read,
    check_pass,
    check_shapes,
    keep_cache,
    log_dense,
)
from hf_kvret.attention.masks import retrieval_mask
from hf_kvret.attention.model_state import (
    end_use,
    keep_prepared,
    keep_state,
    prepare_state,
    remove_hooks,
)
from hf_kvret.attention.prompt_check import watch
from hf_kvret.attention.prompt_chunks import chunk_prompt, forget_chunk
from hf_kvret.attention.requests import Request, current_request, is_served, request
from hf_kvret.attention.visit import new_cache
from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.signals import interruptible
from hf_kvret.layer.hybrid import recording, stop_recording
from hf_kvret.layer.layer import HANDLE
from hf_kvret.methods.a2ats import A2ATSCache
from hf_kvret.methods.aqua import AquaKVCache
from hf_kvret.methods.ctkvr import CTkvrCache
from hf_kvret.methods.flat import FlatKVCache
from hf_kvret.methods.h2o import H2OCache
from hf_kvret.methods.known import METHODS as _methods
from hf_kvret.methods.latent import LatentKVCache
from hf_kvret.methods.lrqk import LRQKCache
from hf_kvret.methods.native import NativeKVCache
from hf_kvret.methods.paris import ParisKVCache
from hf_kvret.models.compatibility import check_model, text_key
from hf_kvret.models.ranks import agreed, check_split, tell_of_error
from hf_kvret.models.versions import CACHE_NAME, cache_argument, name_cache
from hf_kvret.replay import DecodeGraph
from hf_kvret_model_patches import generation, latent, mappings, pooled_choice

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
    NativeKVCache,
)

# These options say where files lie, which may differ by rank.
_OF_A_RANK = ("artifact", "disk")

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
    hooks = generation.Hooks(
        name_arguments=name_cache,
        around=_around_generate,
        prepare_cache=_prepare_cache,
        check_batch=_refuse_batch,
        before_pass=keep_cache,
        after_pass=check_pass,
        choose_call=_decode_call,
    )
    generation.apply(tuple(_methods), hooks)


def unregister() -> None:
    """Undo ``register`` and put every switched model back. Doing it twice is harmless.

    What other libraries wrapped around the same functions of transformers since, and names that
    they added, stay.
    """
    for model in list(_attached):
        restore(model)
    generation.restore()
    latent.restore()
    pooled_choice.restore()
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
    check_split(model)
    latent.apply(model, _is_handle)
    pooled_choice.apply(model, _is_switched, lambda cache: isinstance(cache, RetrievalCache))
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


def _is_switched(config: PreTrainedConfig) -> bool:
    return config._attn_implementation in OUR_NAMES


def _is_handle(latents: torch.Tensor) -> bool:
    return getattr(latents, HANDLE, None) is not None


def restore(model: PreTrainedModel) -> None:
    """Give ``model`` back the attention it had. Harmless on a model that was never switched."""
    supports = getattr(model, "_supports_sdpa", False)
    text = model.config.get_text_config(decoder=True)
    inner = [getattr(model.config, key, None) for key in model.config.sub_configs]
    for config in (text, *filter(None, inner), model.config):
        if config._attn_implementation in OUR_NAMES:
            base = recorded_base(config) or ("sdpa" if supports else "eager")
            config._attn_implementation = {"": base}
        forget_base(config)
    remove_hooks(model)
    _attached.discard(model)


@contextmanager
def _around_generate(
    model: PreTrainedModel, arguments: dict[str, Any]
) -> Iterator[Callable[[Any], None]]:
    """Context of a call of ``generate``; if it fails, the attention it switched is restored.

    Yields what is to be called with its result.
    """
    failed = True
    with interruptible(signal.SIGINT), request(model, arguments) as call:
        cache, past_len = cache_argument(arguments), 0
        call.retrieves = _retrieves(call)
        try:
            prepare_state(call)
            if call.retrieves:
                past_len = 0 if cache is None else cache.get_seq_length()
                check_shapes(call, past_len)
            yield partial(check_end, call)
            if call.retrieves and isinstance(arguments.get("custom_generate"), str):
                check_foreign(call, past_len)
            failed, call.has_retrieved = False, call.cache is not None
        except Exception:
            # The other ranks wait in `_prepare_cache`, but for one of the caller's own loops.
            if not call.is_prepared and arguments.get("custom_generate") is None:
                tell_of_error(model)
            raise
        finally:
            end_use(call)
            cache, call.cache = call.cache, None
            if cache is not None:
                stop_recording(cache.layers, but=call.recording)
            # A call in another thread may still use the attention that this one switched.
            with _attention_lock:
                if failed and call.switched and not is_served(model):
                    restore(model)
    if cache is not None:
        log_dense(cache)


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
    call.is_prepared = True
    with agreed(model) as facts:
        is_made = _make_cache(call, generation_config, model_kwargs)
        if call.cache is not None:
            options = asdict(call.cache.options) | dict.fromkeys(_OF_A_RANK)
            facts += [call.cache.name, sorted(options.items()), call.start_len]
            facts.append(generation_config.prefill_chunk_size)
    return is_made


def _make_cache(call: Request, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """As ``_prepare_cache``, of one rank."""
    model = call.model
    keep_prepared(call)
    name = generation_config.cache_implementation
    cache: Any = model_kwargs.get(CACHE_NAME)
    if generation_config.is_assistant:
        # `generate` passes the main model's options on to a draft model, which has its own cache.
        if name in _methods:
            generation_config.cache_implementation = generation_config.cache_config = None
        forget_chunk(generation_config)
        return False
    check_one_cache(cache, name, _methods)
    if cache is None and name is None and generation_config.use_cache is not False:
        name = model.config.get_text_config(decoder=True)._attn_implementation
    is_callers = isinstance(cache, RetrievalCache)
    if is_callers:
        generation_config.cache_implementation = None
    elif cache is None and name in _methods:
        mask = model_kwargs.get("attention_mask")
        cache = _new_cache(call, name, generation_config, mask)
    else:
        check_options_are_read(call, generation_config, cache, _methods)
        return False
    check_call(call, cache, generation_config, model_kwargs.get("attention_mask"))
    text = model.config.get_text_config(decoder=True)
    with _attention_lock:
        call.switched = text._attn_implementation not in OUR_NAMES
        call.start_len, call.recording = cache.get_seq_length(), recording(cache.layers)
        attach(model)
    chunk_prompt(model, cache, generation_config, model_kwargs, call.cuts_end)
    model_kwargs[CACHE_NAME] = cache
    return not is_callers


def _new_cache(call: Request, name: str, generation_config: Any, mask: Any) -> RetrievalCache:
    """A cache of a registered method for ``call``, with the options of ``cache_config``."""
    check_model(call.model)
    options = generation_config.cache_config or {}
    if not isinstance(options, dict):
        raise TypeError(f"cache_config must be a dict of options, got {type(options).__name__}")
    return new_cache(call, _methods[name], options, generation_config, mask)


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
