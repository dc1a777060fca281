"""The patch of ``generate``: names for ``cache_implementation``, and hooks in a call.

transformers has no registration for such names. It checks the name against a tuple and turns it
into a cache in ``GenerationMixin._prepare_cache_for_generation``; both are changed here, and every
other name goes the way it always went. ``generate`` is wrapped as a whole for its arguments, its
end and its failure. Continuous batching is wrapped to be refused.

In all its modes ``generate`` calls ``prepare_inputs_for_generation`` before a pass, and
``_update_model_kwargs_for_generation`` with the output behind it. Models that override the first
call that of transformers. Passes that a logits processor makes go through neither.

Before its loop ``generate`` asks ``_valid_auto_compile_criteria`` whether to compile decode steps,
and then ``get_compiled_call`` for what to call. Where the hook has a callable, the first answers
yes and the second hands it out. Beam search and assisted decoding don't ask, and call the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import configuration_utils
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.utils import GenerationMixin

from hf_kvret_model_patches.wrappers import Function, Patches, signature_with

_NAMES = "ALL_CACHE_IMPLEMENTATIONS"

_patches = Patches()
# The names that were added to those of transformers and of other libraries.
_added: tuple[str, ...] = ()
# The call that a thread's hook chose, between the question and the answer.
_chosen = threading.local()


@dataclass(frozen=True)
class Hooks:
    """Functions that a call of ``generate`` runs; by default they do nothing.

    Attributes:
        name_arguments: ``(keywords)``; it may rename keywords of ``generate``.
        around: ``(model, arguments)``, the arguments by name; gives the context of the whole call.
        prepare_cache: ``(model, generation_config, model_kwargs)``; True where it has put a cache
            into ``model_kwargs`` and transformers has nothing left to do.
        check_batch: ``(model, arguments)``, before continuous batching; it may raise.
        before_pass: ``(model, input_ids, keywords)``; it may change the keywords that inputs are
            prepared from.
        after_pass: ``(model, output)``.
        choose_call: ``(model, generation_config, model_kwargs)``; gives the callable for decode
            steps, or None, which leaves the decision to transformers.
    """

    name_arguments: Callable[[dict[str, Any]], None] = lambda keywords: None
    around: Callable[[Any, dict[str, Any]], AbstractContextManager[None]] = (
        lambda model, arguments: nullcontext()
    )
    prepare_cache: Callable[[Any, Any, dict[str, Any]], bool] = lambda *arguments: False
    check_batch: Callable[[Any, dict[str, Any]], None] = lambda *arguments: None
    before_pass: Callable[[Any, Any, dict[str, Any]], None] = lambda *arguments: None
    after_pass: Callable[[Any, Any], None] = lambda *arguments: None
    choose_call: Callable[[Any, Any, dict[str, Any]], Function | None] = lambda *arguments: None


def known_names() -> tuple[str, ...]:
    """The names that ``cache_implementation`` may have now."""
    return tuple(getattr(configuration_utils, _NAMES))


def foreign_names() -> set[str]:
    """Those of transformers and of other libraries."""
    return set(known_names()) - set(_added)


def apply(names: tuple[str, ...], hooks: Hooks) -> None:
    """Accept ``names`` as ``cache_implementation``, and call ``hooks``.

    Applying again replaces the names and the hooks.
    """

    def generate(inner: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
        hooks.name_arguments(kwargs)
        signature = signature_with(inner, "generation_config")
        values = signature.bind_partial(model, *args, **kwargs).arguments
        with hooks.around(model, {**values, **values.get("kwargs", {})}):
            return inner(model, *args, **kwargs)

    # Kyutai's model passes the first two by these names.
    def prepare_cache(
        inner: Function,
        model: Any,
        generation_config: Any,
        model_kwargs: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if hooks.prepare_cache(model, generation_config, model_kwargs):
            return None
        return inner(model, generation_config, model_kwargs, *args, **kw)

    def check_batch(inner: Function, model: Any, *args: Any, **kwargs: Any) -> Any:
        signature = signature_with(inner, "generation_config")
        values = signature.bind_partial(model, *args, **kwargs).arguments
        hooks.check_batch(model, {**values, **values.get("kwargs", {})})
        return inner(model, *args, **kwargs)

    def start_manager(inner: Function, manager: Any, *args: Any, **kwargs: Any) -> Any:
        hooks.check_batch(manager.model, {"generation_config": manager.generation_config})
        return inner(manager, *args, **kwargs)

    def prepare_inputs(
        inner: Function, model: Any, input_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not args:
            hooks.before_pass(model, input_ids, kwargs)
        return inner(model, input_ids, *args, **kwargs)

    def update_kwargs(inner: Function, model: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        hooks.after_pass(model, outputs)
        return inner(model, outputs, *args, **kwargs)

    def criteria(inner: Function, model: Any, model_kwargs: Any, generation_config: Any) -> bool:
        _chosen.call = hooks.choose_call(model, generation_config, model_kwargs)
        return _chosen.call is not None or bool(inner(model, model_kwargs, generation_config))

    _patches.apply(GenerationMixin, "generate", generate)
    _patches.apply(GenerationMixin, "_prepare_cache_for_generation", prepare_cache)
    # All ways to continuous batching make a manager by the second, and let it work by the third;
    # the first drops keywords that it does not know.
    _patches.apply(GenerationMixin, "generate_batch", check_batch)
    _patches.apply(GenerationMixin, "init_continuous_batching", check_batch)
    _patches.apply(ContinuousBatchingManager, "start", start_manager)
    _patches.apply(GenerationMixin, "prepare_inputs_for_generation", prepare_inputs)
    _patches.apply(GenerationMixin, "_update_model_kwargs_for_generation", update_kwargs)
    _patches.apply(GenerationMixin, "_valid_auto_compile_criteria", criteria)
    _patches.apply(PreTrainedModel, "get_compiled_call", _compiled_call)
    _add(names)


def restore() -> None:
    """Take our names and hooks away; what others added or wrapped stays. Harmless twice."""
    _patches.restore()
    _add(())


def _compiled_call(inner: Function, model: Any, *args: Any, **kwargs: Any) -> Function:
    call: Function | None = getattr(_chosen, "call", None)
    # Nothing holds it but its caller: with that goes its memory.
    _chosen.call = None
    return inner(model, *args, **kwargs) if call is None else call


def _add(names: tuple[str, ...]) -> None:
    """Add ``names`` in place of those that were added before; all others keep their order."""
    global _added
    kept = tuple(name for name in known_names() if name not in _added or name in names)
    new = tuple(name for name in names if name not in kept)
    setattr(configuration_utils, _NAMES, (*kept, *new))
    _added = names
