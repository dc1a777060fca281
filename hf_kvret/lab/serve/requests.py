"""Requests to transformers' server: which cache they get, and what they may ask of it.

A request is vetted where the server makes its generation config, and its cache is made once in
front of the answer, so that a mistake is answered with status 400 and what to do about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fastapi import HTTPException
from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving import model_manager
from transformers.cli.serving import utils as serving

from hf_kvret.attention.visit import SHELF, STEP
from hf_kvret.registry import registered_methods
from hf_kvret.shelf import Shelf

BUDGETS = ("top_k", "select_heads", "rest", "rest_blocks", "warn_lost_mass", "prompt")
"""Options of a cache that a request may set: none names a path, a memory or a repository."""

# Options of the server's that a cache of another method gets too.
_MEMORY = ("store", "disk", "device_budget", "slots", "bits", "prefill_chunk", "graph")
# Options that name folders and repositories: a model's own config does not decide on them.
_PLACES = ("disk", "artifact", "revision", "artifact_sha256", SHELF, STEP)
# Fields of a generation config that have the server read a checkpoint again.
_LOADING = ("use_mtp", "assistant_early_exit", "speculation_type")


@dataclass(frozen=True)
class ServedCache:
    """The cache of requests that name none.

    Attributes:
        method: name of a registered method.
        options: of ``cache_config``.
        shelf: for prompts, a folder or a ``Shelf``; None for none.
        model_first: whether a cache that the model's generation config names is taken before it.
    """

    method: str
    options: dict[str, Any]
    shelf: Shelf | str | None = None
    model_first: bool = False

    def set_cache(
        self, config: GenerationConfig, requested: dict[str, Any], defaults: GenerationConfig
    ) -> None:
        """Put a cache into the ``config`` of a request.

        Args:
            config: of the request; one of its own, or a copy of the model's.
            requested: the request's own generation config, empty where it has none.
            defaults: the model's.

        Raises:
            ValueError: a cache, options or fields that a request can't set.
        """
        name, budgets = requested.get("cache_implementation"), requested.get("cache_config")
        for field in _LOADING:
            if requested.get(field):
                raise ValueError(f"{field}: this server answers without drafts, leave it out")
        if budgets is not None and not isinstance(budgets, dict):
            raise ValueError(f"cache_config={budgets!r}: pass an object, as {{'top_k': 256}}")
        for option in budgets or {}:
            if option not in BUDGETS:
                raise ValueError(
                    f"cache_config has {option!r}, which is the server's: a request may set "
                    f"{', '.join(BUDGETS)}"
                )
        method, options = self._for_model(defaults)
        if name not in (None, method):
            if name == "dynamic" and not budgets:
                return
            method, options = name, self._for_method(name)
        config.cache_implementation, config.cache_config = method, {**options, **(budgets or {})}
        if self.shelf is not None:
            config.cache_config[SHELF] = self.shelf

    def _for_model(self, defaults: GenerationConfig) -> tuple[str, dict[str, Any]]:
        """Method and options of the model's generation config, or the server's."""
        method = defaults.cache_implementation
        if not self.model_first or method not in registered_methods():
            return self.method, self.options
        options = defaults.cache_config or {}
        return method, {name: x for name, x in options.items() if name not in _PLACES}

    def _for_method(self, name: str) -> dict[str, Any]:
        """Options for another method than the server's; ValueError for one that can't be named."""
        cls = registered_methods().get(name)
        if cls is None or cls.needs_artifact:
            known = [key for key, one in registered_methods().items() if not one.needs_artifact]
            raise ValueError(
                f"cache_implementation={name!r}: a request may name {', '.join(known)}, or "
                "'dynamic' without cache_config"
            )
        given = ((key, self.options[key]) for key in _MEMORY if key in self.options)
        return {key: value for key, value in given if cls.Config.takes(key, value)}


def check_cache(model: PreTrainedModel, config: GenerationConfig) -> None:
    """HTTPException 400 where the cache that ``config`` names can't be made for ``model``."""
    method = registered_methods().get(config.cache_implementation)
    if method is None:
        return
    options = dict(config.cache_config or {})
    for name in (SHELF, STEP):
        options.pop(name, None)
    try:
        method(model.config, **options)
    except (TypeError, ValueError) as error:
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
    """Inside, transformers' servers of one model give its requests ``cache``.

    Requests may name another cache, as far as ``set_cache`` lets them, and no other model.
    """
    handler, manager = serving.BaseHandler, model_manager.ModelManager
    build = handler._build_generation_config

    def build_with_cache(
        self: Any, body: dict[str, Any], defaults: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        try:
            requested = json.loads(body.get("generation_config") or "{}")
            if not isinstance(requested, dict):
                raise ValueError(f"generation_config={requested!r}: pass an object")
            config = build(self, body, defaults, use_cb=use_cb)
            cache.set_cache(config, requested, defaults)
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from error
        return config

    def of_its_model(load: Any) -> Any:
        def load_checked(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            pinned = self.force_model
            # Older versions of transformers have no file of weights in a name.
            if hasattr(serving, "split_model_id"):
                pinned, _ = serving.split_model_id(pinned)
            if name != self.process_model_name(pinned):
                raise HTTPException(400, f"this server answers with {self.force_model} alone")
            return load(self, name, *args, **kwargs)

        return load_checked

    with ExitStack() as stack:
        stack.enter_context(patch.object(handler, "_build_generation_config", build_with_cache))
        stack.enter_context(patch.object(serving, "GenerateManager", CheckedManager))
        for name in ("load_model_and_processor", "load_model_streaming"):
            stack.enter_context(patch.object(manager, name, of_its_model(getattr(manager, name))))
        yield
