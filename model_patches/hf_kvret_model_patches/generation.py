"""The one patch of transformers: names for ``cache_implementation``.

transformers has no registration for them. It checks the name against a tuple and turns it
into a cache in ``GenerationMixin._prepare_cache_for_generation``; both are changed here, and
every other name goes the way it always went. ``generate`` is wrapped for what only the whole call
shows: what it was given, and that it failed. Continuous batching is wrapped to be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from transformers.generation import configuration_utils
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.utils import GenerationMixin

from hf_kvret_model_patches.wrappers import WrappedFunction, once, signature_with

_NAMES = "ALL_CACHE_IMPLEMENTATIONS"

_generate = WrappedFunction(GenerationMixin, "generate")
_prepare_cache = WrappedFunction(GenerationMixin, "_prepare_cache_for_generation")
# All ways to continuous batching make a manager by the first, and let it work by the second.
_make_manager = WrappedFunction(GenerationMixin, "init_continuous_batching")
_start_manager = WrappedFunction(ContinuousBatchingManager, "start")

# The names that were added to those of transformers and of other libraries.
_added: tuple[str, ...] = ()


def known_names() -> tuple[str, ...]:
    """The names that ``cache_implementation`` may have now."""
    return tuple(getattr(configuration_utils, _NAMES))


def foreign_names() -> set[str]:
    """Those of transformers and of other libraries."""
    return set(known_names()) - set(_added)


def apply(
    names: tuple[str, ...],
    prepare: Callable[[Any, Any, dict[str, Any]], bool],
    check_batch: Callable[[Any, Any], None],
    around: Callable[[Any, dict[str, Any]], AbstractContextManager[Callable[[Any], None]]],
    name_arguments: Callable[[dict[str, Any]], None],
) -> None:
    """Accept ``names``, and ask ``prepare`` before transformers makes a cache.

    ``check_batch(model, generation_config)`` is called before continuous batching and may raise.
    ``prepare(model, generation_config, model_kwargs)`` returns True when it has put a cache into
    ``model_kwargs`` and transformers has nothing left to do. All of ``generate`` runs within
    ``around(model, arguments)``, the arguments by name, and what that yields is called with the
    result. ``name_arguments(keywords)`` may rename keywords of ``generate`` before. Applying again
    replaces the names and the hooks.
    """

    def generate(whole: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        name_arguments(kwargs)
        signature = signature_with(whole, "generation_config")
        given = signature.bind_partial(model, *args, **kwargs).arguments
        arguments = {**given, **given.get("kwargs", {})}
        with around(model, arguments) as finish:
            result = whole(model, *args, **kwargs)
            finish(result)
            return result

    def prepare_cache(
        original: Callable[..., Any],
        model: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if prepare(model, generation_config, model_kwargs):
            return None
        return original(model, generation_config, model_kwargs, *args, **kwargs)

    def make_manager(make: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        signature = signature_with(make, "generation_config")
        given = signature.bind_partial(model, *args, **kwargs).arguments
        check_batch(model, given.get("generation_config"))
        return make(model, *args, **kwargs)

    def start_manager(start: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        check_batch(manager.model, manager.generation_config)
        return start(manager, *args, **kwargs)

    _generate.apply(once(generate))
    _prepare_cache.apply(once(prepare_cache))
    _make_manager.apply(once(make_manager))
    _start_manager.apply(once(start_manager))
    _add(names)


def restore() -> None:
    """Take our names and hooks away; what others added or wrapped stays. Harmless twice."""
    for wrapped in (_generate, _prepare_cache, _make_manager, _start_manager):
        wrapped.restore()
    _add(())


def _add(names: tuple[str, ...]) -> None:
    """Add ``names`` in place of those that were added before; all others keep their order."""
    global _added
    kept = tuple(name for name in known_names() if name not in _added or name in names)
    new = tuple(name for name in names if name not in kept)
    setattr(configuration_utils, _NAMES, (*kept, *new))
    _added = names
