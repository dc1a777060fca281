"""A look at every pass of ``generate``, before its inputs are prepared and behind it.

In all its modes ``generate`` calls ``prepare_inputs_for_generation`` before a pass, and
``_update_model_kwargs_for_generation`` with the output behind it. Models that override the first
call that of transformers. Passes that a logits processor makes go through neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.generation.utils import GenerationMixin

from hf_kvret_model_patches.wrappers import WrappedFunction

_prepare = WrappedFunction(GenerationMixin, "prepare_inputs_for_generation")
_update = WrappedFunction(GenerationMixin, "_update_model_kwargs_for_generation")


def apply(
    before: Callable[[Any, Any, dict[str, Any]], None], after: Callable[[Any, Any], None]
) -> None:
    """Call ``before(model, input_ids, keywords)`` and ``after(model, output)`` around each pass.

    ``before`` may change the keywords that inputs are prepared from. Applying again replaces both.
    """

    def prepare_inputs(
        prepare: Callable[..., Any], model: Any, input_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not args:
            before(model, input_ids, kwargs)
        return prepare(model, input_ids, *args, **kwargs)

    def update_model_kwargs(
        update: Callable[..., Any], model: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        after(model, outputs)
        return update(model, outputs, *args, **kwargs)

    _prepare.apply(prepare_inputs)
    _update.apply(update_model_kwargs)


def restore() -> None:
    """Take both hooks away. Harmless when nothing was applied."""
    _prepare.restore()
    _update.restore()
