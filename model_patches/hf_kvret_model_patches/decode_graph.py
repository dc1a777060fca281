"""A decode call of one's own inside ``generate``, where transformers would compile one.

Before its loop ``generate`` asks ``_valid_auto_compile_criteria`` whether to compile decode steps,
and then ``get_compiled_call`` for what to call. Both are wrapped: where our hook has a callable,
the first answers yes and the second hands it out. Everything else goes the way it always went.
Beam search and assisted decoding don't ask, and call the model.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

_ASKS = "_valid_auto_compile_criteria"
_GETS = "get_compiled_call"

Choose = Callable[[Any, Any, dict[str, Any]], Callable[..., Any] | None]

_saved: dict[str, Any] = {}
# What the thread was told to call, between the question and the answer.
_chosen = threading.local()


def apply(choose: Choose) -> None:
    """Ask ``choose(model, generation_config, model_kwargs)`` for what to call in a decode loop.

    None leaves the decision to transformers. Applying again replaces the hook.
    """
    restore()
    asks, gets = getattr(GenerationMixin, _ASKS), getattr(PreTrainedModel, _GETS)
    _saved[_ASKS], _saved[_GETS] = asks, gets

    @functools.wraps(asks)
    def valid_criteria(
        self: Any, model_kwargs: dict[str, Any], generation_config: Any, *args: Any, **kwargs: Any
    ) -> bool:
        _chosen.call = choose(self, generation_config, model_kwargs)
        if _chosen.call is not None:
            return True
        return bool(asks(self, model_kwargs, generation_config, *args, **kwargs))

    @functools.wraps(gets)
    def compiled_call(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        call: Callable[..., Any] | None = getattr(_chosen, "call", None)
        # Nothing holds it but its caller: with that goes its memory.
        _chosen.call = None
        return gets(self, *args, **kwargs) if call is None else call

    setattr(GenerationMixin, _ASKS, valid_criteria)
    setattr(PreTrainedModel, _GETS, compiled_call)


def restore() -> None:
    """Put transformers back as it was. Harmless when nothing was applied."""
    if _saved:
        setattr(GenerationMixin, _ASKS, _saved.pop(_ASKS))
        setattr(PreTrainedModel, _GETS, _saved.pop(_GETS))
