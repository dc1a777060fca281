"""A call of ``generate``: its arguments, and what it has found out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.methods.known import METHODS
from hf_kvret.models.versions import cache_argument


@dataclass(eq=False)
class Request:
    """One call of ``generate``.

    Attributes:
        model: whose ``generate`` was called.
        arguments: by name, as the caller gave them.
        cache: the retrieval cache that the call owns, once that is known.
        keeps: tokens to which its cache goes back, once the call is checked; None: it does not.
        pass_start: tokens in the cache before the newest pass; with drafts, before the call.
        recording: layers of the cache that recorded the past before it.
        has_retrieved: the call used a retrieval cache to its end.
        is_delegated: a call of ``generate`` inside this one did.
        preparation: of the state that a model keeps, or None.
        prepared_state: what ``generate`` had the model keep for the first pass; empty after that.
        keep_prompt: called before each pass, and when the call ends, also where it fails.
        points: lengths of the cache at which a snapshot is taken.
        retrieves: it asks for a retrieval cache, as far as its arguments tell.
        thread: that it runs in.
        text_len: ids of a sequence, as ``generate`` counts them, at its newest pass.
        steps: what decodes, with ``lossless``; it reads ahead until it is closed.
    """

    model: PreTrainedModel
    arguments: dict[str, Any]
    cache: RetrievalCache | None = None
    keeps: int | None = None
    pass_start: int = 0
    recording: Sequence[Any] = ()
    has_retrieved: bool = False
    is_delegated: bool = False
    preparation: Any = None
    prepared_state: dict[str, Any] = field(default_factory=dict)
    keep_prompt: Callable[[], None] = lambda: None
    points: frozenset[int] = frozenset()
    retrieves: bool = False
    thread: int = field(default_factory=threading.get_ident)
    text_len: int = 0
    steps: Any = None

    def prompt_ids(self) -> torch.Tensor | None:
        """``[B, T]`` ids that the caller gave; None for a prompt without ids."""
        ids = self.arguments.get("input_ids")
        if ids is None and getattr(self.model, "main_input_name", "input_ids") == "input_ids":
            ids = self.arguments.get("inputs")
        is_ids = isinstance(ids, torch.Tensor) and ids.ndim == 2 and not ids.is_floating_point()
        return ids if is_ids else None

    def prompt(self) -> tuple[str, torch.Tensor | None]:
        """The tensor that has the tokens, ids or embeddings, and its argument's name."""
        own = getattr(self.model, "main_input_name", "input_ids")
        for name in ("inputs_embeds", "input_ids", "inputs", own):
            prompt = self.arguments.get(name)
            if isinstance(prompt, torch.Tensor):
                return name, prompt
        return "input_ids", None

    def token_prompt(self) -> torch.Tensor | None:
        """``prompt`` of ids or embeddings; None for sounds and others that are no tokens."""
        name, prompt = self.prompt()
        form = (3, True) if name == "inputs_embeds" else (2, False)
        is_text = prompt is not None and (prompt.ndim, prompt.is_floating_point()) == form
        return prompt if is_text else None

    def mask(self, prepared: Any) -> Any:
        """The attention mask that the caller gave, or that transformers ``prepared``; or None."""
        mask = self.arguments.get("attention_mask")
        if mask is None and isinstance(prepared, torch.Tensor) and prepared.ndim == 2:
            prompt = self.token_prompt()
            # Rows were repeated for beams.
            mask = prepared[:: 1 if prompt is None else max(1, len(prepared) // len(prompt))]
        return mask

    def sets(self, name: str) -> bool:
        """Whether the caller set ``name``, by keyword or in a generation config of this call."""
        return name in self.arguments or self.configured(name) is not None

    def configured(self, name: str) -> Any:
        """``name`` in the generation config that the caller passed; None if it is not set there.

        What a copy of the model's own config has in common with it is not the caller's.
        """
        value = set_in(self.arguments.get("generation_config"), name)
        own = set_in(getattr(self.model, "generation_config", None), name)
        return None if value == own else value


def set_in(config: GenerationConfig | None, name: str) -> Any:
    """What somebody set in a generation config; None where nobody did.

    transformers before 5.20 fills a pipeline's config with its own defaults, all of them.
    """
    value = getattr(config, name, None)
    if config is None or value is None:
        return None
    usual = config._get_default_generation_params()
    is_filled = None not in (getattr(config, one, 0) for one in usual if usual[one] is not None)
    return None if is_filled and value == usual.get(name) else value


def retrieves(call: Request) -> bool:
    """Whether ``call`` asks for a retrieval cache, as far as its own arguments and names tell.

    Raises:
        TypeError: a name or a class stands where a cache should.
    """
    cache = cache_argument(call.arguments)
    if cache is not None:
        if isinstance(cache, str | type):
            raise TypeError(
                f"{cache!r} is no cache: name a method by cache_implementation='paris', or pass a "
                "cache, as ParisKVCache(model.config)"
            )
        return isinstance(cache, RetrievalCache)
    names = [call.arguments.get("cache_implementation"), call.configured("cache_implementation")]
    names += [getattr(call.model.generation_config, "cache_implementation", None)]
    return next(filter(None, names), None) in METHODS and not call.configured("is_assistant")


# All running calls, in any thread; the newest last.
_running: list[Request] = []
_lock = threading.Lock()


@contextmanager
def request(model: PreTrainedModel, arguments: dict[str, Any]) -> Iterator[Request]:
    """A new ``Request``, the current one of its model and thread until the call is over."""
    call = Request(model, arguments)
    with _lock:
        _running.append(call)
    try:
        yield call
    finally:
        with _lock:
            _running.remove(call)
            for outer in _running:
                if outer.thread == call.thread and outer.model is model:
                    outer.is_delegated |= call.has_retrieved or call.is_delegated
        call.keep_prompt()


def take_cache(call: Request, cache: RetrievalCache) -> None:
    """Have ``call`` own ``cache`` until it is over; errors as of ``check_free``."""
    with _lock:
        check_free(call, cache)
        call.cache = cache


def check_free(call: Request, cache: RetrievalCache) -> None:
    """RuntimeError where a call in another thread than that of ``call`` owns ``cache``."""
    if any(one.cache is cache and one.thread != call.thread for one in tuple(_running)):
        raise RuntimeError(
            "another thread is in a call of generate with this cache: a cache serves one call "
            "at a time. Give each call a cache of its own (cache.fork() shares what is held)"
        )


def current_request(model: PreTrainedModel) -> Request:
    """The newest running call of ``model``'s ``generate`` in this thread.

    A request without arguments where transformers' functions are called without ``generate``.
    """
    call = next((one for one in _calls_here() if one.model is model), None)
    return call or Request(model, {})


def call_using(cache: RetrievalCache) -> Request | None:
    """The running call of ``generate`` in this thread that uses ``cache``; None without one."""
    return next((one for one in _calls_here() if one.cache is cache), None)


def _calls_here() -> list[Request]:
    """The running calls in this thread, the newest first."""
    thread = threading.get_ident()
    with _lock:
        return [one for one in reversed(_running) if one.thread == thread]
