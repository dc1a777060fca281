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
from dataclasses import dataclass, field
from threading import Event
from typing import Annotated, Any, Literal

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import _GenerationCancelled

_log = logging.getLogger(__name__)

# Routes that take a body, and the field that each of them needs.
_ROUTES = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/load_model": "model",
}
# What a body can make fail, past the schema, before the model reads: a chat template, a tool's
# arguments, a picture that can't be opened.
_MISTAKES = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RecursionError),
    *(TemplateError, TypeError, ValueError),
)
# Arguments of the tokenizer; all others are the chat template's own.
_TOKENIZERS = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()

_Count = Annotated[int, Field(gt=0, lt=1 << 31)]
_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Positive = Annotated[float, Field(gt=0, lt=1e9)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True)
    # The server passes it on even where it is null.
    parallel_tool_calls: bool = False


class _Item(_Checked):
    content: str | list[dict[str, Any]] | None = None


class _Message(_Item):
    role: str


def _schema(*kinds: tuple[Any, str]) -> type[_Checked]:
    """Each kind with the names of fields that may have it, or null."""
    fields: Any = {name: (kind | None, None) for kind, names in kinds for name in names.split()}
    return create_model("fields", __base__=_Checked, **fields)


_BODY = _schema(
    (str, "model prompt suffix generation_config"),
    (Annotated[list[_Message], Field(min_length=1)], "messages"),
    (Annotated[str | list[_Item], Field(min_length=1)], "input"),
    (bool, "stream"),
    (Literal[1], "n best_of"),
    (Annotated[float, Field(ge=0, lt=1e9)], "temperature"),
    (_Share, "top_p"),
    (Annotated[float, Field(gt=-1, lt=1e9)], "frequency_penalty"),
    (Annotated[int, Field(ge=0, lt=1 << 63)], "seed"),
    (_Count, "max_tokens max_completion_tokens max_output_tokens"),
    (str | list[str], "stop"),
    (dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], float], "logit_bias"),
    (dict[str, Any], "chat_template_kwargs"),
)
# A request's own generation config: what an answer of one text, by one model, may take.
_SETTINGS = _schema(
    (_Count, "max_new_tokens"),
    (_Id, "min_new_tokens top_k no_repeat_ngram_size bos_token_id pad_token_id"),
    (_Id | list[_Id], "eos_token_id"),
    (_Positive, "temperature repetition_penalty"),
    (_Share, "top_p min_p"),
    (bool, "do_sample"),
    (str | list[str], "stop_strings"),
    (str, "cache_implementation transformers_version"),
    (dict[str, Any], "cache_config"),
)


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


def own_settings(body: dict[str, Any]) -> dict[str, Any]:
    """The generation config of a request; HTTPException 400 where it sets what it can't."""
    settings = _parsed(body.get("generation_config") or "{}", _SETTINGS, "generation_config")
    names = _SETTINGS.model_fields.keys() - _Checked.model_fields.keys()
    for name in settings.keys() - names:
        raise HTTPException(
            400,
            f"generation_config has {name!r}, which is the server's: a request may set "
            f"{', '.join(sorted(names))}",
        )
    return settings


def _parsed(text: str | bytes, schema: type[_Checked], name: str) -> dict[str, Any]:
    """The JSON object ``text``; HTTPException 400 where it is not what ``schema`` says."""
    try:
        value = json.loads(text)
        # Numbers that are not finite, and halves of surrogate pairs, can't be sent back.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        # As floats where floats belong.
        return value | schema.model_validate(value).model_dump(exclude_unset=True)
    except RecursionError:
        reason = "it is nested too deep"
    except TypeError:
        reason = "pass it as JSON text"
    except ValidationError as error:
        reason = _sentence(error)
    except ValueError as error:
        reason = f"it is no JSON ({error})"
    raise HTTPException(400, f"{name}: {reason}")


def _sentence(error: ValidationError) -> str:
    """The mistake that lies deepest: a value of several types has one for each of them."""
    mistakes = error.errors(include_url=False)
    worst = max(mistakes, key=lambda one: len(one["loc"]))
    alike = [one for one in mistakes if one["input"] is worst["input"]]
    # Among the places are types, as list[_Item].
    place = ".".join(str(one) for one in worst["loc"] if one != "str" and "[" not in str(one))
    words = " or ".join(one["msg"].partition(" or instance")[0] for one in alike)
    return f"{place} is {worst['input']!r:.60}: {words}" if place else words


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
            self._check(Request(scope), body)

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

    def _check(self, request: Request, body: bytes) -> None:
        """HTTPException for a ``body`` that the route of ``request`` can't take."""
        required = _ROUTES.get(request.url.path)
        if required is None:
            raise HTTPException(404, f"this server answers {', '.join(_ROUTES)} alone")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, f"Content-Type is {kind!r}: send application/json")
        values = _parsed(body, _BODY, "the body")
        if values.get(required) is None:
            raise HTTPException(400, f"{required} is missing")
        if values.get("model") not in (None, self.model):
            raise HTTPException(400, f"this server answers with {self.model} alone")
        for name in (values.get("chat_template_kwargs") or {}).keys() & _TOKENIZERS - {"documents"}:
            raise HTTPException(400, f"chat_template_kwargs: {name!r} is the server's, drop it")
