"""Requests to transformers' server: which cache they get, and what they may ask of it.

A request is vetted where the server makes its generation config, and its cache is made once in
front of the answer, so that a mistake is answered with status 400 and what to do about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fastapi import HTTPException
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving import utils as serving

from hf_kvret.registry import registered_methods
from hf_kvret.shelf import Shelf

BUDGETS = ("top_k", "select_heads", "rest", "rest_blocks", "warn_lost_mass", "prompt")
"""Options of a cache that a request may set: none names a path, a memory or a repository."""


@dataclass(frozen=True)
class ServedCache:
    """The cache of requests that name none.

    Attributes:
        method: name of a registered method.
        options: of ``cache_config``.
        shelf: for prompts, or None.
        yields: whether a cache that the model's own generation config names goes before it.
    """

    method: str
    options: dict[str, Any]
    shelf: Shelf | None = None
    yields: bool = False

    def give(self, config: GenerationConfig, asked: dict[str, Any]) -> None:
        """Put a cache into the ``config`` of a request.

        Args:
            config: of the request; one of its own, or a copy of the model's.
            asked: the request's own generation config, empty where it has none.

        Raises:
            ValueError: options that a request can't set.
        """
        name, own = asked.get("cache_implementation"), asked.get("cache_config")
        methods = registered_methods()
        if name is not None and name not in methods:
            # It is one of transformers' own, which has checked the name.
            return
        if own is not None and not isinstance(own, dict):
            raise ValueError(f"cache_config={own!r}: pass an object, as {{'top_k': 256}}")
        for option in own or {}:
            if option not in BUDGETS:
                raise ValueError(
                    f"cache_config has {option!r}, which is the server's: a request may set "
                    f"{', '.join(BUDGETS)}"
                )
        method, options = self._usual(config, asked)
        if name not in (None, method):
            method, options = name, {}
        config.cache_implementation, config.cache_config = method, {**options, **(own or {})}
        if self.shelf is not None:
            config.cache_config["shelf"] = self.shelf

    def _usual(self, config: GenerationConfig, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The cache of the model's generation config, or of the server: method and options."""
        # A request with a config of its own leaves nothing of the model's.
        method = None if asked else config.cache_implementation
        if self.yields and method in registered_methods():
            return method, config.cache_config or {}
        return self.method, self.options


def check_cache(model: PreTrainedModel, config: GenerationConfig) -> None:
    """HTTPException 400 where the cache that ``config`` names can't be made for ``model``."""
    method = registered_methods().get(config.cache_implementation)
    if method is None:
        return
    options = dict(config.cache_config or {})
    options.pop("shelf", None)
    try:
        method(model.config, **options)
    except (OSError, TypeError, ValueError) as error:
        raise HTTPException(400, str(error)) from error


class CheckedManager(serving.GenerateManager):
    """Answers requests one after the other, each with a cache that can be made."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own; HTTPException 400 for a cache that can't be made."""
        check_cache(model, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own; HTTPException 400 for what a call of ``generate`` refuses."""
        check_cache(model, gen_config)
        try:
            return await super().generate_non_streaming(
                model, processor, inputs, gen_config, *args, **kwargs
            )
        except (NotImplementedError, ValueError) as error:
            raise HTTPException(400, str(error)) from error


@contextmanager
def answering_with(cache: ServedCache) -> Iterator[None]:
    """Inside, transformers' servers give their requests ``cache``, unless these name another."""
    build = serving.BaseHandler._build_generation_config

    def build_with_cache(
        handler: Any, body: dict[str, Any], usual: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        try:
            asked = json.loads(body.get("generation_config") or "{}")
            if not isinstance(asked, dict):
                raise ValueError(f"generation_config={asked!r}: pass an object")
            config = build(handler, body, usual, use_cb=use_cb)
            cache.give(config, asked)
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from error
        return config

    with (
        patch.object(serving.BaseHandler, "_build_generation_config", build_with_cache),
        patch.object(serving, "GenerateManager", CheckedManager),
    ):
        yield
