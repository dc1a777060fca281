"""Which mask a model's own attention would have had: a finished one, padding, or none.

Some models make their mask twice: an outer model hands its mask to a text model, which calls the
mask function again. transformers then keeps a finished mask, of four dims, as it is. It makes a new
one from padding, and from no mask, which sdpa has where its own causal attention is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._guards import TracingContext
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_kvret.attention.base_attention import recorded_base

# The attention of a model without a record: most models have it.
_USUAL = "sdpa"
# Building a block mask calls a compiler, so it can't be stopped on the way.
_ALWAYS_FINISHED = ("flex_attention",)


@dataclass(frozen=True)
class MaskForm:
    """The form of a mask.

    Attributes:
        shape: ``(B, 1, Q, T)`` of a finished mask; None where there is padding or no mask.
        padding: ``[B, T]``, of masks that are not finished; None where there is no mask.
    """

    shape: tuple[int, int, int, int] | None = None
    padding: torch.Tensor | None = None


class _FinishedError(Exception):
    """A mask function begins to build a mask of four dims."""


def base_form(arguments: dict[str, Any]) -> MaskForm:
    """The form of the mask that the model's own attention would make; no mask is built.

    As transformers itself, it looks at the values of padding, where these decide.

    Args:
        arguments: what transformers passes to a mask function.
    """
    config = arguments.get("config")
    base = (None if config is None else recorded_base(config)) or _USUAL
    batch, new, total = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
    finished = MaskForm((batch, 1, new, total))
    if base in _ALWAYS_FINISHED:
        return finished
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(base)
    if make is None:
        return MaskForm()
    try:
        # A mask of four dims is made of what the function says of each query and key.
        padding = make(**{**arguments, "mask_function": _stop})
    except _FinishedError:
        return finished
    return MaskForm(padding=padding)


def is_traced() -> bool:
    """Whether torch.compile reads a tensor now, and needs the dims that its memory has."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def _stop(*indices: Any) -> NoReturn:
    raise _FinishedError
