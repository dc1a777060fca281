"""Whether the passes of a call of ``generate`` use its retrieval cache.

A model may drop the cache that ``generate`` hands to it, or put another in its place: some do at a
certain length, some in training mode, and so may a wrapper around a model. The answer can still be
right, but nothing is retrieved, or what the cache holds is not the text. So every pass is compared
with the call, and at its end the number of tokens in the cache.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from hf_kvret.attention.requests import Request, current_request
from hf_kvret.cache import RetrievalCache
from hf_kvret.models.versions import CACHE_NAME, cache_argument, cache_of

_log = logging.getLogger(__name__)

# Caches whose reason for retrieving nothing was logged.
_logged: weakref.WeakSet[RetrievalCache] = weakref.WeakSet()

_REMEDY = (
    "use cache_implementation='dynamic' for this model, and report it; the retrieval cache of this "
    "call can't go on: begin with a new one, or cache.reset()"
)


def keep_cache(model: Any, input_ids: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Give back a cache that a model drops as it prepares a pass, empty, to read the text anew.

    Phi-3 does so where the text outgrows the short factors of its RoPE. transformers' own cache
    would be a new one there. Nothing happens where the text is not at hand, as after a prompt of
    embeddings: then ``check_pass`` raises. ``arguments``, the keywords of
    ``prepare_inputs_for_generation``, are changed in place; ``input_ids`` are the text so far.
    """
    call = current_request(model)
    cache = call.cache
    if cache is None or cache_argument(arguments) is not None:
        return
    if cache.get_seq_length():
        if input_ids.shape[1] <= cache.get_seq_length():
            return
        cache.reset()
        cache.meet(call.model)
        cache.expect(input_ids.shape[1], input_ids.shape[1])
        arguments["next_sequence_length"] = None
    arguments[CACHE_NAME] = cache


def check_pass(model: Any, output: Any) -> None:
    """ValueError where a pass of ``generate`` used another cache than that of the call, or none."""
    call = current_request(model)
    if call.cache is None:
        return
    cache = cache_of(output)
    if cache is not None and cache is not call.cache:
        raise ValueError(
            f"{type(model).__name__} ran a forward pass without the cache of this call: its output "
            f"has a {type(cache).__name__}. {_place(call)}{_REMEDY}"
        )
    if call.cache.get_seq_length() <= call.start_len:
        raise ValueError(
            f"{type(model).__name__} added no token to the cache of this call in a forward pass: "
            "its layers don't get the cache, as with gradient checkpointing in training mode. Call "
            f"model.eval() and model.gradient_checkpointing_disable(), or {_REMEDY}"
        )


def check_end(call: Request, result: Any) -> None:
    """ValueError where at the end of ``generate`` the cache lacks more than the newest token."""
    tokens = getattr(result, "sequences", result)
    if call.cache is None or not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
        return
    added, least = call.cache.get_seq_length() - call.start_len, _least_added(call, tokens)
    if added < least:
        raise ValueError(
            f"generate read {least} tokens or more, and the cache of this call holds {added} of "
            f"them: {type(call.model).__name__} ran forward passes without it. "
            f"{_place(call)}{_REMEDY}"
        )


def _least_added(call: Request, tokens: torch.Tensor) -> int:
    """How many tokens the cache must have been given for ``tokens [B, T]`` to be the result."""
    if call.arguments.get("custom_generate") is not None:
        # It may give back what it likes.
        return 1
    ids, embedded = call.prompt_ids(), call.arguments.get("inputs_embeds")
    new = tokens.shape[1] - (0 if ids is None else ids.shape[1])
    prompt = embedded if isinstance(embedded, torch.Tensor) else ids
    length = 0 if prompt is None else prompt.shape[1]
    mask = call.arguments.get("attention_mask")
    # A mask of all tokens beside the ids of the new ones.
    is_new_alone = isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] > length
    cached_len = 0 if is_new_alone else call.start_len
    return max(0, length - cached_len) + new - 1


def check_foreign(call: Request, held: int) -> None:
    """ValueError where a ``generate`` from a folder or from the hub never used the cache.

    That runs in place of transformers' own, before any cache is made. ``held``: tokens that the
    cache, if one was given, held before.
    """
    cache = cache_argument(call.arguments)
    grew = cache is not None and cache.get_seq_length() > held
    if call.cache is None and not grew and not call.is_delegated:
        raise ValueError(
            f"custom_generate={call.arguments['custom_generate']!r} ran without the retrieval "
            "cache: it must hand on the cache, or cache_implementation, to the model's generate; "
            "leave custom_generate out, or use cache_implementation='dynamic'"
        )


def _place(call: Request) -> str:
    """Where to look, if the caller brought a loop of their own."""
    return (
        "custom_generate must hand on the cache that it is given, or "
        if call.arguments.get("custom_generate") is not None
        else "It drops the cache in prepare_inputs_for_generation or in its forward: "
    )


def log_dense(cache: RetrievalCache) -> None:
    """Log, once for a ``cache``, that it was too short to retrieve anything."""
    reason = cache.why_dense()
    if reason is not None and cache not in _logged:
        _logged.add(cache)
        _log.info("%s", reason)
