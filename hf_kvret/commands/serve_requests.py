"""Requests to transformers' server: what they may set, which cache each gets, and who leaves.

The cache of a request is made once in front of the answer, so that a mistake in its options gets
status 400 and a sentence.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial, wraps
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import TypeAdapter, ValidationError
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import GenerationConfig
from transformers.cli.serving import model_manager, server, utils as serving

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.from_shelf import SHELF, STEP, USUAL_STEP
from hf_kvret.models.versions import cache_of
from hf_kvret.registry import registered_methods
from hf_kvret.shelf import Shelf
from hf_kvret.shelf.questions import plain_generation_config

_log = logging.getLogger(__name__)

BUDGETS = ("top_k", "rest", "prompt")
"""Options of a cache that a request may set: none names a path, a memory or a repository."""

# Routes that take a body, and the field that each of them needs.
_ROUTES = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/load_model": "model",
}
# Fields that transformers' server passes over, and the value that asks for nothing.
_PASSED_OVER: dict[str, Any] = {
    **dict.fromkeys(("n", "best_of"), 1),
    **dict.fromkeys(("logprobs", "top_logprobs", "presence_penalty", "echo", "background"), 0),
    **dict.fromkeys(("audio", "previous_response_id", "conversation")),
    "tool_choice": "auto",
    "response_format": {"type": "text"},
}
# A body can raise these before the model reads: by a type, by a chat template, by a picture.
_MISTAKES = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RecursionError),
    *(TemplateError, TypeError, ValueError),
)
# A request's own generation config may set these, to values of these types.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size"), int),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), int),
    "eos_token_id": int | list[int],
    **dict.fromkeys(("temperature", "repetition_penalty", "top_p", "min_p"), float),
    "do_sample": bool,
    "stop_strings": str | list[str],
    **dict.fromkeys(("cache_implementation", "transformers_version"), str),
    "cache_config": dict[str, Any],
}
_SETTINGS = {name: TypeAdapter(kind | None) for name, kind in _TYPES.items()}


@dataclass
class Client:
    """Who sent a request.

    Attributes:
        left: set when it leaves.
        is_read: its prompt was taken, so that what fails is the server's fault.
    """

    left: Event = field(default_factory=Event)
    is_read: bool = False


CLIENT: ContextVar[Client] = ContextVar("client")
"""The client of the request at hand, in its task and in the thread that answers."""


def _own_settings(body: dict[str, Any]) -> dict[str, Any]:
    """The generation config of a request; HTTPException 400 where it sets what it can't."""
    settings = _parsed(body.get("generation_config") or "{}", "generation_config")
    for name in settings.keys() - _SETTINGS.keys():
        raise HTTPException(
            400,
            f"generation_config has {name!r}, which is the server's: a request may set "
            f"{', '.join(sorted(_SETTINGS))}",
        )
    for name, value in settings.items():
        try:
            _SETTINGS[name].validate_python(value, strict=True)
        except ValidationError as error:
            reason = ", or: ".join(dict.fromkeys(one["msg"] for one in error.errors()))
            fact = f"generation_config has {name}={repr(value)[:80]}"
            raise HTTPException(400, f"{fact}: {reason}") from error
    return settings


def _parsed(text: Any, name: str) -> dict[str, Any]:
    """The JSON object ``text``; HTTPException 400 for anything else."""
    try:
        value = json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise HTTPException(400, f"{name} is no JSON text ({error})") from error
    if not isinstance(value, dict):
        raise HTTPException(400, f"{name} is no JSON object")
    return value


class BodyCheck:
    """Middleware of ASGI between a client and transformers' ``app``, which serves ``model``."""

    def __init__(self, app: ASGIApp, model: str) -> None:
        self.app, self.model = app, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the body of a POST, have ``app`` answer it, and notice when its client leaves."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] == "/reset":
            return await self.app(scope, receive, send)
        client, watcher = Client(), None
        CLIENT.set(client)
        try:
            body = await Request(scope, receive).body()
            self._check(scope["path"], body)

            async def watch() -> Message:
                message = await receive()
                client.left.set()
                return message

            watcher, messages = asyncio.create_task(watch()), [body]

            async def receive_again() -> Message:
                if messages:
                    return {"type": "http.request", "body": messages.pop(), "more_body": False}
                return await asyncio.shield(watcher)

            return await self.app(scope, receive_again, send)
        except (ClientDisconnect, serving._GenerationCancelled):
            # Nobody reads it, but transformers' own middleware asks for an answer.
            status, reason = 499, "the client left"
        except HTTPException as error:
            status, reason = error.status_code, error.detail
        except _MISTAKES as error:
            if client.is_read:
                raise
            _log.warning("a request could not be read", exc_info=True)
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            status, reason = 400, f"the request can't be read: {reason}"
        finally:
            if watcher is not None:
                watcher.cancel()
        await JSONResponse({"detail": reason}, status)(scope, receive, send)

    def _check(self, path: str, body: bytes) -> None:
        """HTTPException for a route that uses no cache of ours, another model, or other answers."""
        if path not in _ROUTES:
            raise HTTPException(404, f"this server answers {', '.join(_ROUTES)} alone")
        values = _parsed(body, "the body")
        if values.get(_ROUTES[path]) is None:
            raise HTTPException(400, f"{_ROUTES[path]} is missing")
        if values.get("model") not in (None, self.model):
            raise HTTPException(400, f"this server answers with {self.model} alone")
        for name, neutral in _PASSED_OVER.items():
            if name == "tool_choice" and not values.get("tools"):
                continue
            if values.get(name) not in (None, neutral):
                raise HTTPException(400, f"{name} is not served here: leave it out")


@dataclass(frozen=True)
class ServedCache:
    """The cache of requests.

    Attributes:
        method: name of a registered method.
        options: of ``cache_config``.
        shelf: for prompts, a folder or a ``Shelf``; None for none.
    """

    method: str
    options: dict[str, Any]
    shelf: Shelf | str | None = None

    def set_cache(self, config: GenerationConfig, requested: dict[str, Any]) -> None:
        """Put a cache into the ``config`` of a request.

        Args:
            config: of the request; one of its own, or a copy of the model's.
            requested: the request's own generation config, empty where it has none.

        Raises:
            ValueError: a cache, or options, that a request can't set.
        """
        name, budgets = requested.get("cache_implementation"), requested.get("cache_config") or {}
        if name == "dynamic" and not budgets:
            return
        if name not in (None, self.method):
            raise ValueError(
                f"cache_implementation={name!r}: a request may name {self.method!r}, or 'dynamic' "
                "without cache_config"
            )
        for option in budgets:
            if option not in BUDGETS:
                raise ValueError(
                    f"cache_config has {option!r}, which is the server's: a request may set "
                    f"{', '.join(BUDGETS)}"
                )
        config.cache_implementation = self.method
        config.cache_config = {**self.options, **budgets, "on_divergence": "crop"}
        if self.shelf is not None:
            config.cache_config[SHELF] = self.shelf


class NewestConversation:
    """The cache of the newest request, with which the next one of its conversation goes on.

    The thread that answers alone uses it.

    Attributes:
        cache: None before the first request, and behind one that failed.
    """

    def __init__(self) -> None:
        self.cache: RetrievalCache | None = None
        self._asked: tuple[str, dict[str, Any]] | None = None

    def generate(self, generate: Callable[..., Any], **arguments: Any) -> Any:
        """As a model's ``generate``, with the cache where the request asks for one like it.

        Where more tokens are new than a shelf asks for, the shelf is asked, and takes the prompt.
        """
        config, ids = arguments["generation_config"], arguments["input_ids"]
        options = dict(config.cache_config or {})
        shelf = options.pop(SHELF, None)
        method = registered_methods().get(config.cache_implementation)
        other = {name for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        other -= {"input_ids", "attention_mask"}
        other |= arguments.keys() & {"past_key_values", "return_dict_in_generate"}
        if method is None or method.Config.evicts_by or other:
            return generate(**arguments)
        asked, (kept, self.cache) = (method.name, options), (self.cache, None)
        most = ids.shape[1] if shelf is None else USUAL_STEP
        if kept is not None and asked == self._asked and ids.shape[1] - _shared(kept, ids) < most:
            arguments["past_key_values"] = kept
            config.cache_implementation = config.cache_config = None
        # Two caches at once would need twice the memory.
        del kept
        result = generate(**arguments, return_dict_in_generate=True)
        self.cache, self._asked = cache_of(result), asked
        return result.sequences


def _shared(cache: RetrievalCache, ids: torch.Tensor) -> int:
    """Tokens with which both ``cache`` and ``ids [1, T]`` begin."""
    length = cache.get_seq_length()
    difference = cache.tokens.difference(ids, torch.ones_like(ids), length)
    return min(length, ids.shape[1]) if difference is None else difference[1]


class CheckedManager(serving.GenerateManager):
    """Answers requests one after the other, each with a cache that can be made.

    Prompts have at most ``max_prompt`` tokens; None: as many as the model has positions.
    """

    def __init__(self, max_prompt: int | None = None) -> None:
        super().__init__()
        self._max_prompt = max_prompt

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own; HTTPException 400 for a prompt or a cache that can't be."""
        self._check(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own; HTTPException 400 for what a call of ``generate`` refuses."""
        self._check(model, inputs, gen_config)
        try:
            return await super().generate_non_streaming(
                model, processor, inputs, gen_config, *args, **kwargs
            )
        except (NotImplementedError, ValueError) as error:
            raise HTTPException(400, str(error)) from error

    def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, with the client of the request at hand."""
        return super().submit(copy_context().run, fn, *args, **kwargs)

    def async_submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, with the client of the request at hand."""
        return super().async_submit(copy_context().run, fn, *args, **kwargs)

    def _check(self, model: Any, inputs: Any, config: GenerationConfig) -> None:
        """HTTPException 400 for a prompt or a cache that can't be; ends answers with positions."""
        length, text = inputs["input_ids"].shape[-1], model.config.get_text_config(decoder=True)
        positions = getattr(text, "max_position_embeddings", None)
        most = min(filter(None, (positions, self._max_prompt)), default=length)
        if not 0 < length <= most:
            raise HTTPException(
                400, f"the prompt has {length} tokens, and this server takes 1 to {most}"
            )
        method = registered_methods().get(config.cache_implementation)
        options = {k: x for k, x in (config.cache_config or {}).items() if k not in (SHELF, STEP)}
        try:
            if method is not None:
                method(model.config, **options)
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from error
        # `generate` refuses empty ones, and the whole numbers of OpenAI's ``logit_bias``. A model's
        # own bias is a list.
        if isinstance(bias := config.sequence_bias, dict):
            bias = {ids: float(value) for ids, value in bias.items()}
        config.sequence_bias = bias or None
        config.stop_strings = config.stop_strings or None
        if positions is not None and config.max_new_tokens is not None:
            # The last token of an answer takes no position.
            config.max_new_tokens = min(config.max_new_tokens, positions - length + 1)
        CLIENT.get().is_read = True


@contextmanager
def answering_with(cache: ServedCache, max_prompt: int | None = None) -> Iterator[None]:
    """Inside, transformers' servers of one model give its requests ``cache``, and no other model.

    Prompts have at most ``max_prompt`` tokens; None: as many as the model has positions.
    """
    newest = NewestConversation()
    handler, manager = serving.BaseHandler, model_manager.ModelManager
    build, load, make = handler._build_generation_config, manager._load_model, server.build_server

    def build_with_cache(
        self: Any, body: dict[str, Any], defaults: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        requested = _own_settings(body)
        if requested:
            body = {**body, "generation_config": json.dumps(requested)}
        try:
            config = build(self, body, defaults, use_cb=use_cb)
            cache.set_cache(config, requested)
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from error
        return config

    def load_watched(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        model.generation_config, dropped = plain_generation_config(model)
        if dropped:
            _log.warning("left out of the model's generation_config: %s", ", ".join(dropped))
        prepare = model.prepare_inputs_for_generation

        # `generate` calls it before each pass: of a chunk of the prompt, and of a token.
        @wraps(prepare)
        def prepare_unless_left(*args: Any, **kwargs: Any) -> Any:
            if CLIENT.get().left.is_set():
                raise serving._GenerationCancelled
            return prepare(*args, **kwargs)

        model.prepare_inputs_for_generation = prepare_unless_left
        model.generate = partial(newest.generate, model.generate)
        return model

    def make_checked(models: Any, *args: Any, **kwargs: Any) -> Any:
        app = make(models, *args, **kwargs)
        # The innermost, so that its answers get the headers of the others.
        app.user_middleware.append(Middleware(BodyCheck, models.force_model))
        return app

    with (
        patch.object(handler, "_build_generation_config", build_with_cache),
        patch.object(serving, "GenerateManager", partial(CheckedManager, max_prompt)),
        patch.object(manager, "_load_model", load_watched),
        patch.object(server, "build_server", make_checked),
    ):
        yield
