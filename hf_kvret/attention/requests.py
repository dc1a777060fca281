"""A call of ``generate``: its arguments, and what to undo if it fails."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvret.attention.prompt_shape import check_form, check_rows
from hf_kvret.cache import RetrievalCache

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Request:
    """One call of ``generate``.

    Attributes:
        model: whose ``generate`` was called.
        arguments: by name, as the caller gave them.
        cache: the retrieval cache that the call uses, once that is known.
        switched: the call switched the model's attention to ours.
        start_len: tokens that the cache held before the call.
        has_retrieved: the call used a retrieval cache to its end.
        is_delegated: a call of ``generate`` inside this one did.
        prepared_state: what ``generate`` had the model keep for the first pass; None after that.
    """

    model: PreTrainedModel
    arguments: dict[str, Any]
    cache: RetrievalCache | None = None
    switched: bool = False
    start_len: int = 0
    has_retrieved: bool = False
    is_delegated: bool = False
    prepared_state: dict[str, Any] | None = None

    def prompt_ids(self) -> torch.Tensor | None:
        """``[B, T]`` ids that the caller gave; None for a prompt without ids."""
        ids = self.arguments.get("input_ids")
        if ids is None and getattr(self.model, "main_input_name", "input_ids") == "input_ids":
            ids = self.arguments.get("inputs")
        is_ids = isinstance(ids, torch.Tensor) and ids.ndim == 2 and not ids.is_floating_point()
        return ids if is_ids else None

    def gives(self, name: str) -> bool:
        """Whether the caller set ``name``, by keyword or in a generation config of this call."""
        return name in self.arguments or self.configured(name) is not None

    def configured(self, name: str) -> Any:
        """``name`` in the generation config that the caller passed; None if it is not set there."""
        config = self.arguments.get("generation_config")
        own = getattr(self.model, "generation_config", None)
        return None if config is None or config is own else getattr(config, name, None)


# All running calls, in any thread; the newest last.
_under_way: list[tuple[int, Request]] = []
_lock = threading.Lock()

# Caches whose reason for retrieving nothing was logged.
_logged: weakref.WeakSet[RetrievalCache] = weakref.WeakSet()


@contextmanager
def request(model: PreTrainedModel, arguments: dict[str, Any]) -> Iterator[Request]:
    """A new ``Request``, the current one of its model and thread until the call is over."""
    entry = threading.get_ident(), Request(model, arguments)
    with _lock:
        _under_way.append(entry)
    try:
        yield entry[1]
    finally:
        with _lock:
            _under_way.remove(entry)
            for owner, outer in _under_way:
                if owner == entry[0] and outer.model is model:
                    outer.is_delegated |= entry[1].has_retrieved or entry[1].is_delegated


def current_request(model: PreTrainedModel) -> Request:
    """The newest running call of ``model``'s ``generate`` in this thread.

    A request without arguments where transformers' functions are called without ``generate``.
    """
    thread = threading.get_ident()
    with _lock:
        for owner, newest in reversed(_under_way):
            if owner == thread and newest.model is model:
                return newest
    return Request(model, {})


def is_served(model: PreTrainedModel) -> bool:
    """Whether a running call of ``generate``, in any thread, uses a retrieval cache."""
    with _lock:
        return any(one.model is model and one.cache is not None for _, one in _under_way)


def is_using(cache: RetrievalCache) -> bool:
    """Whether a running call of ``generate`` in this thread uses ``cache``."""
    thread = threading.get_ident()
    with _lock:
        return any(owner == thread and one.cache is cache for owner, one in _under_way)


def check_length(call: Request, cache: RetrievalCache) -> None:
    """ValueError unless the prompt of ``call`` continues the tokens in ``cache``.

    A prompt of the new tokens alone is accepted if it has positions, and a mask of all tokens.
    """
    cache_len = cache.get_seq_length()
    name, prompt = prompt_of(call)
    length = 0 if prompt is None else prompt.shape[1] if prompt.ndim > 1 else len(prompt)
    mask, positions = (call.arguments.get(x) for x in ("attention_mask", "position_ids"))
    has_positions = _width(mask) == cache_len + length and _width(positions) == length
    if cache_len and length <= cache_len and not has_positions:
        raise ValueError(
            f"{name} has {length} tokens, past_key_values holds {cache_len}: pass the whole "
            "conversation, the tokens that the cache holds and the new ones behind them (or "
            "cache.crop to forget the newest, cache.reset() to begin anew)"
        )


def check_prompt_form(call: Request, cache_len: int) -> None:
    """``check_form`` of the prompt and the mask that ``call`` was given."""
    check_form(_token_prompt(call), call.arguments.get("attention_mask"), cache_len)


def check_prompt_rows(call: Request, cache_len: int, prepared: Any) -> None:
    """``check_rows`` of the mask that ``call`` was given, or that transformers ``prepared``."""
    mask = prompt_mask(call, prepared)
    if mask is not None:
        check_rows(mask, cache_len)


def prompt_mask(call: Request, prepared: Any) -> Any:
    """The attention mask that ``call`` was given, or that transformers ``prepared``; or None."""
    mask = call.arguments.get("attention_mask")
    if mask is None and isinstance(prepared, torch.Tensor) and prepared.ndim == 2:
        prompt = _token_prompt(call)
        # Rows were repeated for beams.
        mask = prepared[:: 1 if prompt is None else max(1, len(prepared) // len(prompt))]
    return mask


def _token_prompt(call: Request) -> torch.Tensor | None:
    """Ids or embeddings that ``call`` was given; None for sounds and others that are no tokens."""
    name, prompt = prompt_of(call)
    if prompt is None:
        return None
    embedded = name == "inputs_embeds"
    is_text = prompt.ndim == 2 + embedded and prompt.is_floating_point() == embedded
    return prompt if is_text else None


def prompt_of(call: Request) -> tuple[str, torch.Tensor | None]:
    """The tensor that has the tokens of ``call``, ids or embeddings, and its argument's name."""
    own = getattr(call.model, "main_input_name", "input_ids")
    for name in ("inputs_embeds", "input_ids", "inputs", own):
        prompt = call.arguments.get(name)
        if isinstance(prompt, torch.Tensor):
            return name, prompt
    return "input_ids", None


def _width(tensor: object) -> int | None:
    """Size of the last dimension; None if it is not a tensor with dimensions."""
    return tensor.shape[-1] if isinstance(tensor, torch.Tensor) and tensor.ndim else None


def warn_of_top_k(call: Request, method: str, samples: bool) -> None:
    """Warn of a ``top_k`` that was meant for the cache: ``generate`` takes it for sampling."""
    top_k = call.arguments.get("top_k", call.configured("top_k"))
    if top_k is not None and not samples:
        _log.warning(
            "top_k=%s is generate's own, for sampling, and does nothing without do_sample=True. "
            "The budget of the cache is cache_config={'top_k': ...} beside "
            "cache_implementation=%r, or top_k of the cache's class",
            top_k,
            method,
        )


def tell_dense(cache: RetrievalCache) -> None:
    """Log, once for a ``cache``, that it was too short to retrieve anything."""
    reason = cache.why_dense()
    if reason is not None and cache not in _logged:
        _logged.add(cache)
        _log.info("%s", reason)
