"""The matrix of a projection that is linear, whatever stands in its place.

An ``nn.Linear`` that nobody changed is its weight and its bias. Anything else (a subclass, an
adapter, a parametrization, quantized, offloaded or distributed weights, hooks) is multiplied with
the identity, at each call because nobody knows what has changed since.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules import module as module_of_torch


@dataclass(frozen=True, eq=False)
class Affine:
    """A projection ``x -> matrix x + offset``.

    Attributes:
        matrix: ``[out, in]``.
        offset: ``[out]``, or None where there is none.
    """

    matrix: torch.Tensor
    offset: torch.Tensor | None


def affine(projection: nn.Module, like: torch.Tensor, inputs: int) -> Affine:
    """What ``projection`` does to vectors of ``inputs`` elements, of dtype and device of ``like``.

    The matrix of a plain linear layer is its weight itself. The projection must be linear.
    """
    if _is_plain(projection):
        weight, bias = projection.weight, projection.bias
        return Affine(weight, bias)  # type: ignore[arg-type]
    return _images(projection, like, inputs)


def _is_plain(projection: nn.Module) -> bool:
    """Whether it is weight and bias: a linear layer that nobody wrapped, hooked or distributed."""
    if type(projection) is not nn.Linear or "forward" in projection.__dict__:
        return False
    types = {type(projection.weight), type(projection.bias)}
    return types <= {nn.Parameter, type(None)} and not is_hooked(projection)


def _images(projection: nn.Module, like: torch.Tensor, inputs: int) -> Affine:
    """The images of the identity's rows, and of zero, which a bias moves."""
    images = projection(torch.eye(inputs + 1, inputs, dtype=like.dtype, device=like.device))
    offset = images[inputs]
    # The difference of two numbers in bf16 has more digits than they have.
    wide = torch.promote_types(images.dtype, torch.float32)
    matrix = images[:inputs].to(wide) - offset.to(wide)
    return Affine(matrix.T.to(images.dtype).contiguous(), offset)


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook runs around the module: one of its own, or one of all modules."""
    hooks = (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module_of_torch._global_forward_hooks, module_of_torch._global_forward_pre_hooks),
    )
    return any(hooks)
