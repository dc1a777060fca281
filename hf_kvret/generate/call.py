"""A call of ``generate``: its cache, the model's attention, and what happens at its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.signals import interruptible
from hf_kvret.generate.attach import attach
from hf_kvret.generate.checks import (
    check_call,
    check_custom,
    check_one_cache,
    check_options_are_read,
    check_shapes,
    why_not,
)
from hf_kvret.generate.chunks import chunk_prompt
from hf_kvret.generate.from_shelf import new_cache
from hf_kvret.generate.lossless import steps_of
from hf_kvret.generate.model_state import end_use, keep_prepared, prepare_state
from hf_kvret.generate.provenance import go_back, kept_len
from hf_kvret.generate.requests import Request, current_request, request, retrieves
from hf_kvret.layer.hybrid import recording, stop_recording
from hf_kvret.methods.known import METHODS
from hf_kvret.models.kept_state import stateful_attributes
from hf_kvret.models.versions import CACHE_NAME, cache_argument
from hf_kvret.replay import DecodeGraph

# Two calls that switch one model would take our attention for its own.
_attention_lock = threading.Lock()


@contextmanager
def around_generate(model: PreTrainedModel, arguments: dict[str, Any]) -> Iterator[None]:
    """Context of a call of ``generate``."""
    with interruptible(signal.SIGINT), request(model, arguments) as call:
        cache, past_len = cache_argument(arguments), 0
        call.retrieves = retrieves(call)
        try:
            if call.retrieves:
                past_len = 0 if cache is None else cache.get_seq_length()
                check_shapes(call, past_len)
            if call.retrieves and cache is not None:
                call.keeps = kept_len(call, cache)
                # The model, or a custom generate, prepares by the cache, so it goes back first.
                if stateful_attributes(model) or isinstance(arguments.get("custom_generate"), str):
                    if call.keeps is not None:
                        check_early(call, cache)
                    go_back(call, cache)
                past_len = cache.get_seq_length()
            prepare_state(call)
            yield
            if call.retrieves and arguments.get("custom_generate") is not None:
                check_custom(call, past_len if call.cache is None else call.pass_start)
            call.has_retrieved = call.cache is not None
        finally:
            end_use(call)
            cache, call.cache = call.cache, None
            if call.steps is not None:
                call.steps.close()
            if cache is not None:
                stop_recording(cache.layers, but=call.recording)


def prepare_cache(
    model: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any]
) -> bool:
    """Hook of ``generate`` before it makes a cache; True if it made the cache.

    Sets the cache in ``model_kwargs`` if a retrieval cache is selected by name, and switches
    the model's attention if a retrieval cache is used.
    """
    call = current_request(model)
    keep_prepared(call)
    name = generation_config.cache_implementation
    cache: Any = model_kwargs.get(CACHE_NAME)
    mask = model_kwargs.get("attention_mask")
    if generation_config.is_assistant:
        # `generate` passes the main model's options on to a draft model, which has its own cache.
        if name in METHODS:
            generation_config.cache_implementation = generation_config.cache_config = None
        return False
    check_one_cache(cache, name)
    if cache is None and name is None and generation_config.use_cache is not False:
        name = model.config.get_text_config(decoder=True)._attn_implementation
    is_callers = isinstance(cache, RetrievalCache)
    if is_callers:
        generation_config.cache_implementation = None
    if cache is None and name in METHODS:
        cache = new_cache(call, METHODS[name], generation_config, mask)
    else:
        check_options_are_read(call, generation_config, cache)
    if not isinstance(cache, RetrievalCache):
        return False
    check_call(call, cache, generation_config, mask)
    call.pass_start, call.recording = cache.get_seq_length(), recording(cache.layers)
    chunk_prompt(call, cache, generation_config, model_kwargs)
    with _attention_lock:
        attach(model)
    model_kwargs[CACHE_NAME] = cache
    return not is_callers


def check_early(call: Request, cache: RetrievalCache) -> None:
    """ValueError where the caller's ``cache`` can't serve ``call``, as far as its arguments say."""
    known, own = vars(GenerationConfig()), call.arguments.get("generation_config")
    given = {name: value for name, value in call.arguments.items() if name in known}
    generation_config, _ = call.model._prepare_generation_config(own, **given)
    check_one_cache(cache, generation_config.cache_implementation)
    generation_config.cache_implementation = None
    check_options_are_read(call, generation_config, cache)
    if reasons := why_not(call, cache, generation_config, None):
        raise ValueError("\n".join(reasons))
    cache.check_model(call.model)


def decode_call(
    model: PreTrainedModel, generation_config: Any, model_kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """The function that ``generate`` calls in its loop; None for the model."""
    cache = model_kwargs.get(CACHE_NAME)
    if not isinstance(cache, RetrievalCache):
        return None
    if cache.options.lossless:
        return steps_of(current_request(model), cache, generation_config)
    if generation_config.disable_compile or generation_config.compile_config is not None:
        # transformers itself reports that a requested compile is not possible.
        return None
    step = DecodeGraph(model, cache)
    return None if step.reason and step.compiled is None else step
