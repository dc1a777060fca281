"""A decode call of one's own inside ``generate``, where transformers would compile one.

Before its loop ``generate`` asks ``_valid_auto_compile_criteria`` whether to compile decode steps,
and then ``get_compiled_call`` for what to call. Both are wrapped: where our hook has a callable,
the first answers yes and the second hands it out. Everything else goes the way it always went.
Beam search and assisted decoding don't ask, and call the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from hf_kvret_model_patches.wrappers import WrappedFunction, once

Choose = Callable[[Any, Any, dict[str, Any]], Callable[..., Any] | None]

_criteria = WrappedFunction(GenerationMixin, "_valid_auto_compile_criteria")
_compiled = WrappedFunction(PreTrainedModel, "get_compiled_call")
# What the thread was told to call, between the question and the answer.
_chosen = threading.local()


def apply(choose: Choose) -> None:
    """Ask ``choose(model, generation_config, model_kwargs)`` for what to call in a decode loop.

    None leaves the decision to transformers. Applying again replaces the hook.
    """

    def valid_criteria(
        criteria: Callable[..., Any],
        model: Any,
        model_kwargs: dict[str, Any],
        generation_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> bool:
        _chosen.call = choose(model, generation_config, model_kwargs)
        if _chosen.call is not None:
            return True
        return bool(criteria(model, model_kwargs, generation_config, *args, **kwargs))

    _criteria.apply(once(valid_criteria))
    _compiled.apply(once(_compiled_call))


def restore() -> None:
    """Leave the decision to transformers again. Harmless when nothing was applied."""
    _criteria.restore()
    _compiled.restore()


def _compiled_call(
    compiled: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    call: Callable[..., Any] | None = getattr(_chosen, "call", None)
    # Nothing holds it but its caller: with that goes its memory.
    _chosen.call = None
    return compiled(model, *args, **kwargs) if call is None else call
