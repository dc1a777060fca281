"""The matrix of a projection that is linear, whatever stands in its place.

An ``nn.Linear`` that nobody changed is its weight and its bias. Anything else (a subclass, an
adapter, a parametrization, quantized, offloaded or distributed weights, hooks) is multiplied with
the identity, at each call because nobody knows what has changed since, and refused if it is not
linear.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules import module as module_of_torch

# The identity is so large where nothing rounds or clips it: a bias is added before the sum is
# rounded, and takes that much less of the matrix's precision. A power of two, far below fp16's end.
_UNIT = 64.0
# Least difference from a linear function, as a share of its image: TF32 and 8 bits stay below.
_TOLERANCE = 4e-3
_SEED = 0
# Modules on a GPU that were linear: to look again the host would wait for the device.
_linear_modules: WeakSet[nn.Module] = WeakSet()


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

    The matrix of a plain linear layer is its weight itself.

    Raises:
        ValueError: the projection is not linear.
    """
    if _is_plain(projection):
        weight, bias = projection.weight, projection.bias
        return Affine(weight, bias)  # type: ignore[arg-type]
    result = _images(projection, like, inputs)
    _check_linear(projection, result, like)
    return result


def _is_plain(projection: nn.Module) -> bool:
    """Whether it is weight and bias: a linear layer that nobody wrapped, hooked or distributed."""
    if type(projection) is not nn.Linear or "forward" in projection.__dict__:
        return False
    types = {type(projection.weight), type(projection.bias)}
    return types <= {nn.Parameter, type(None)} and not _is_hooked(projection)


def _images(projection: nn.Module, like: torch.Tensor, inputs: int) -> Affine:
    """The images of the identity's rows, and of zero, which a bias moves."""
    unit = _unit(projection)
    images = projection(unit * torch.eye(inputs + 1, inputs, dtype=like.dtype, device=like.device))
    offset = images[inputs]
    # The difference of two numbers in bf16 has more digits than they have.
    wide = torch.promote_types(images.dtype, torch.float32)
    matrix = (images[:inputs].to(wide) - offset.to(wide)) / unit
    return Affine(matrix.T.to(images.dtype).contiguous(), offset)


def _unit(projection: nn.Module) -> float:
    """What the identity is multiplied by: 1 where inputs may be quantized in a fixed range."""
    tensors = (*projection.parameters(), *projection.buffers())
    plain = [
        tensor.is_floating_point()
        and tensor.element_size() > 1
        and type(tensor).__module__.partition(".")[0] == "torch"
        for tensor in tensors
    ]
    return _UNIT if plain and all(plain) else 1.0


@torch.no_grad()
def _check_linear(projection: nn.Module, result: Affine, like: torch.Tensor) -> None:
    """ValueError if a vector, long or short and negative, has another image than ``result`` gives.

    Its elements are alike or zero by chance, which quantized inputs keep, too. A module in training
    is not checked, as dropout is chance.
    """
    on_gpu = like.device.type != "cpu"
    if any(module.training for module in projection.modules()):
        return
    if on_gpu and (projection in _linear_modules or torch.cuda.is_current_stream_capturing()):
        return
    inputs = result.matrix.shape[1]
    chance = torch.rand(inputs, generator=torch.Generator().manual_seed(_SEED)) < 0.5
    vector = chance.to(like.device, like.dtype)
    if not all(_agrees(projection, result, one) for one in (_unit(projection) * vector, -vector)):
        raise ValueError(
            f"kv_b_proj is a {type(projection).__name__} that is not linear: the image of a "
            "vector is not made of those of its numbers, so latents can't be attended to as "
            "they are; use cache_implementation='dynamic'"
        )
    if on_gpu:
        _linear_modules.add(projection)


def _agrees(projection: nn.Module, result: Affine, vector: torch.Tensor) -> bool:
    image, expected = projection(vector[None])[0].float(), result.matrix.float() @ vector.float()
    if result.offset is not None:
        expected += result.offset.float()
    tolerance = max(_TOLERANCE, 4 * torch.finfo(result.matrix.dtype).eps)
    # True where an image is not finite: such weights are the model's own affair.
    return not (image - expected).norm() > tolerance * expected.norm()


def _is_hooked(module: nn.Module) -> bool:
    hooks = (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module_of_torch._global_forward_hooks, module_of_torch._global_forward_pre_hooks),
    )
    return any(hooks)
