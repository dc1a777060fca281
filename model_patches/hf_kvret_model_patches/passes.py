"""A look at every pass of ``generate``, before its inputs are prepared and behind it.

In all its modes ``generate`` calls ``prepare_inputs_for_generation`` before a pass, and
``_update_model_kwargs_for_generation`` with the output behind it. Models that override the first
call that of transformers. Passes that a logits processor makes go through neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.generation.utils import GenerationMixin

_PREPARE = "prepare_inputs_for_generation"
_UPDATE = "_update_model_kwargs_for_generation"

_saved: dict[str, Any] = {}


def apply(
    before: Callable[[Any, Any, dict[str, Any]], None], after: Callable[[Any, Any], None]
) -> None:
    """Call ``before(model, input_ids, keywords)`` and ``after(model, output)`` around each pass.

    ``before`` may change the keywords that inputs are prepared from. Applying again replaces both.
    """
    restore()
    prepare, update = getattr(GenerationMixin, _PREPARE), getattr(GenerationMixin, _UPDATE)
    _saved[_PREPARE], _saved[_UPDATE] = prepare, update

    @functools.wraps(prepare)
    def prepare_inputs(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if not args:
            before(self, input_ids, kwargs)
        return prepare(self, input_ids, *args, **kwargs)

    @functools.wraps(update)
    def update_model_kwargs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        after(self, outputs)
        return update(self, outputs, *args, **kwargs)

    setattr(GenerationMixin, _PREPARE, prepare_inputs)
    setattr(GenerationMixin, _UPDATE, update_model_kwargs)


def restore() -> None:
    """Put transformers back as it was. Harmless when nothing was applied."""
    for name in list(_saved):
        setattr(GenerationMixin, name, _saved.pop(name))
