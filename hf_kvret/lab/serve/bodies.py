"""Requests as clients send them: their bodies, which are checked, and clients that leave.

transformers' server takes a body for what it should be, and fails with status 500 where it is not.
So each body goes through one schema first, and a mistake gets a status of 4xx and a sentence.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from contextvars import ContextVar
from threading import Event
from typing import Annotated, Any, Literal, TypeVar

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import _GenerationCancelled

_log = logging.getLogger(__name__)

ROUTES = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/load_model": "model",
}
"""Routes that take a body, and the field that each of them needs."""

# What a body can make fail, past the schema, before the model reads: a chat template, a tool's
# arguments, a picture that can't be opened.
_MISTAKES = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RecursionError),
    *(TemplateError, TypeError, ValueError),
)
# Arguments of the tokenizer; the others of a template are its own.
_TOKENIZERS = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()

_Count = Annotated[int, Field(gt=0, lt=1 << 31)]
_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Positive = Annotated[float, Field(gt=0, lt=1e9)]
_Schema = TypeVar("_Schema", bound="_Checked")


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True)


class Settings(_Checked, extra="forbid"):
    """A request's own generation config: what an answer of one text, by one model, may take."""

    max_new_tokens: _Count | None = None
    min_new_tokens: _Id | None = None
    do_sample: bool | None = None
    temperature: _Positive | None = None
    top_k: _Id | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    repetition_penalty: _Positive | None = None
    no_repeat_ngram_size: _Id | None = None
    stop_strings: str | list[str] | None = None
    bos_token_id: _Id | None = None
    eos_token_id: _Id | list[_Id] | None = None
    pad_token_id: _Id | None = None
    cache_implementation: str | None = None
    cache_config: dict[str, Any] | None = None
    transformers_version: str | None = None


class _Item(_Checked):
    content: str | list[dict[str, Any]] | None = None


class _Message(_Item):
    role: str


class _Body(_Checked):
    model: str | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    prompt: str | None = None
    input: Annotated[str | list[_Item], Field(min_length=1)] | None = None
    suffix: str | None = None
    generation_config: str | None = None
    stream: bool | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    temperature: Annotated[float, Field(ge=0, lt=1e9)] | None = None
    top_p: _Share | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    frequency_penalty: Annotated[float, Field(gt=-1, lt=1e9)] | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    max_output_tokens: _Count | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], float] | None = None
    parallel_tool_calls: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class Client:
    """Who sent a request. ``left`` is set when it leaves, ``is_read`` when its prompt was taken."""

    def __init__(self) -> None:
        self.left, self.is_read = Event(), False

    def check(self) -> None:
        """Raise what ends a call of ``generate``, if the client has left."""
        if self.left.is_set():
            raise _GenerationCancelled


CLIENT: ContextVar[Client] = ContextVar("client")
"""The client of the request at hand, in its task and in the thread that answers."""


def parsed(text: str | bytes, schema: type[_Schema], name: str) -> _Schema:
    """JSON ``text`` by ``schema``; HTTPException 400 where it is not what the schema says."""
    try:
        value = json.loads(text)
        # Numbers that are not finite, and halves of surrogate pairs, can't be sent back.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        return schema.model_validate(value)
    except RecursionError:
        reason = "it is nested too deep"
    except TypeError:
        reason = "pass it as JSON text"
    except ValidationError as error:
        reason = _sentence(error, schema)
    except ValueError as error:
        reason = f"it is no JSON ({error})"
    raise HTTPException(400, f"{name}: {reason}")


def _sentence(error: ValidationError, schema: type[_Checked]) -> str:
    """The mistake that lies deepest: a value of several types has one for each of them."""
    mistakes = error.errors(include_url=False)
    worst = max(mistakes, key=lambda one: len(one["loc"]))
    if worst["type"] == "extra_forbidden":
        return f"{worst['loc'][0]!r} is the server's; it may set {', '.join(schema.model_fields)}"
    alike = [one for one in mistakes if one["input"] is worst["input"]]
    # Among the places are types, as list[_Item].
    place = ".".join(str(one) for one in worst["loc"] if one != "str" and "[" not in str(one))
    words = " or ".join(one["msg"].partition(" or instance")[0] for one in alike)
    return f"{place} is {worst['input']!r:.60}: {words}" if place else words


class BodyCheck:
    """Middleware of ASGI between a client and transformers' ``app``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the body of a POST, have ``app`` answer it, and notice when its client leaves."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] == "/reset":
            return await self.app(scope, receive, send)
        client, watcher = Client(), None
        CLIENT.set(client)
        request = Request(scope, receive)
        try:
            body = await request.body()
            _check(request, body)

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
        except (ClientDisconnect, _GenerationCancelled):
            return None
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


def _check(request: Request, body: bytes) -> None:
    """HTTPException for a ``body`` that the route of ``request`` can't take."""
    required = ROUTES.get(request.url.path)
    if required is None:
        raise HTTPException(404, f"this server answers {', '.join(ROUTES)} alone")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"Content-Type is {kind!r}: send application/json")
    values = parsed(body, _Body, "the body")
    if getattr(values, required) is None:
        raise HTTPException(400, f"{required} is missing")
    for name in values.chat_template_kwargs.keys() & _TOKENIZERS - {"documents"}:
        raise HTTPException(400, f"chat_template_kwargs: {name!r} is the server's, leave it out")
