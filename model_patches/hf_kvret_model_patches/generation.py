"""The one patch of transformers: names for ``cache_implementation``.

transformers has no registration for them. It checks the name against a tuple and turns it
into a cache in ``GenerationMixin._prepare_cache_for_generation``; both are wrapped here, and
every other name goes the way it always went. ``generate`` is wrapped for what only the whole call
shows: what it was given, and that it failed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin

_METHOD = "_prepare_cache_for_generation"
_GENERATE, _BATCH = "generate", "generate_batch"
_NAMES = "ALL_CACHE_IMPLEMENTATIONS"

_saved: dict[str, Any] = {}


def known_names() -> tuple[str, ...]:
    """The names that ``cache_implementation`` may have now."""
    return tuple(getattr(configuration_utils, _NAMES))


def apply(
    names: tuple[str, ...],
    prepare: Callable[[Any, Any, dict[str, Any]], bool],
    check_batch: Callable[[Any, Any], None],
    around: Callable[[Any, dict[str, Any]], AbstractContextManager[Callable[[Any], None]]],
    name_arguments: Callable[[dict[str, Any]], None],
) -> None:
    """Accept ``names``, and ask ``prepare`` before transformers makes a cache.

    ``check_batch(model, generation_config)`` is called first by ``generate_batch`` and may raise.
    ``prepare(model, generation_config, model_kwargs)`` returns True when it has put a cache into
    ``model_kwargs`` and transformers has nothing left to do. All of ``generate`` runs within
    ``around(model, arguments)``, the arguments by name, and what that yields is called with the
    result. ``name_arguments(keywords)`` may rename keywords of ``generate`` before. Applying again
    replaces the names and the hooks.
    """
    restore()
    original = getattr(GenerationMixin, _METHOD)
    _saved[_METHOD], _saved[_NAMES] = original, known_names()
    whole = _saved[_GENERATE] = getattr(GenerationMixin, _GENERATE)
    signature = inspect.signature(whole)

    @functools.wraps(whole)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        name_arguments(kwargs)
        given = signature.bind_partial(self, *args, **kwargs).arguments
        arguments = {**given, **given.get("kwargs", {})}
        with around(self, arguments) as finish:
            result = whole(self, *args, **kwargs)
            finish(result)
            return result

    @functools.wraps(original)
    def prepare_cache(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if prepare(self, generation_config, model_kwargs):
            return None
        return original(self, generation_config, model_kwargs, *args, **kwargs)

    batch = getattr(GenerationMixin, _BATCH)
    _saved[_BATCH] = vars(GenerationMixin).get(_BATCH)

    @functools.wraps(batch)
    def generate_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(batch).bind_partial(self, *args, **kwargs).arguments
        check_batch(self, given.get("generation_config"))
        return batch(self, *args, **kwargs)

    setattr(GenerationMixin, _METHOD, prepare_cache)
    setattr(GenerationMixin, _GENERATE, generate)
    setattr(GenerationMixin, _BATCH, generate_batch)
    setattr(configuration_utils, _NAMES, (*_saved[_NAMES], *names))


def restore() -> None:
    """Put transformers back as it was. Harmless when nothing was applied."""
    if _saved:
        setattr(GenerationMixin, _METHOD, _saved.pop(_METHOD))
        setattr(GenerationMixin, _GENERATE, _saved.pop(_GENERATE))
        inherited = _saved.pop(_BATCH)
        if inherited is None:
            delattr(GenerationMixin, _BATCH)
        else:
            setattr(GenerationMixin, _BATCH, inherited)
        setattr(configuration_utils, _NAMES, _saved.pop(_NAMES))
