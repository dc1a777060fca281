"""The matrix of a projection that is linear, whatever stands in its place.

An ``nn.Linear`` that nobody changed is its weight and its bias. Anything else (a subclass, an
adapter, a parametrization, quantized, offloaded or distributed weights, hooks) is asked for the
images of the unit vectors, one of each input, and refused if it is not linear. On a CPU they are
kept from call to call where all that they can depend on is known: classes of torch, PEFT and
torchao in eval mode, without hooks, whose attributes are numbers, names and tensors on the CPU.
Each call compares all of it with a copy, tensors by their contents, because a write to
``weight.data`` leaves no other trace. On a GPU nothing is kept: to compare there the host would
wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules import module as module_of_torch

# Forwards in these packages read their arguments, their module and the modes below; nothing else.
_KNOWN_MODULES = ("torch.nn.modules.", "peft.tuners.lora.")
_KNOWN_TENSORS = ("torchao.",)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_PLAIN_DTYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
_PLAIN_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
# Unit vectors are so long where nothing rounds or clips them: a bias is added before the sum is
# rounded, and takes that much less of the matrix's precision. A power of two, far below fp16's end.
_UNIT = 64.0
# Least difference from a linear function, as a share of its image: TF32 and 8 bits stay below.
_TOLERANCE = 4e-3
_SEED = 0
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Attributes that every module has; those that count for a forward are looked at one by one.
_OF_TORCH = {*vars(nn.Module()), "extra_repr"}


@dataclass(frozen=True, eq=False)
class Affine:
    """A projection ``x -> matrix x + offset``.

    Attributes:
        matrix: ``[out, in]``.
        offset: ``[out]``, or None where there is none.
    """

    matrix: torch.Tensor
    offset: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _State:
    """All that a module's image of an input depends on: values, and tensors by their contents."""

    values: list[Any]
    tensors: list[torch.Tensor]

    def copy(self) -> _State:
        return _State(self.values, [tensor.detach().clone() for tensor in self.tensors])

    def is_as(self, other: _State) -> bool:
        """Whether both are equal, tensors to the bit."""
        # Equal values stand for as many tensors, of equal shapes and dtypes.
        return self.values == other.values and all(
            torch.equal(_bits(one), _bits(two))
            for one, two in zip(self.tensors, other.tensors, strict=True)
        )


# Modules on a GPU that were found to be linear: to look again the host would wait for the device.
_linear: WeakSet[nn.Module] = WeakSet()
# Each entry is replaced as a whole, so that threads see one or the other. A copied module has none.
_kept: WeakKeyDictionary[nn.Module, tuple[_State, Affine]] = WeakKeyDictionary()


def affine(projection: nn.Module, like: torch.Tensor, inputs: int) -> Affine:
    """What ``projection`` does to vectors of ``inputs`` numbers, of dtype and device of ``like``.

    The matrix of a plain linear layer is its weight itself. What others give was made by calling
    them, now or in a call before which nothing has changed since.

    Raises:
        ValueError: the projection is not linear.
    """
    if is_plain(projection):
        weight, bias = projection.weight, projection.bias
        return Affine(weight, bias)  # type: ignore[arg-type]
    state = _state(projection, like)
    if state is not None:
        known = _kept.get(projection)
        if known is not None and known[0].is_as(state):
            return known[1]
        # A call may change its module: PEFT takes a merged adapter out where it was turned off.
        state = state.copy()
    made = _images(projection, like, inputs)
    _check_linear(projection, made, like)
    if state is not None and not made.matrix.requires_grad:
        _kept[projection] = state, made
    return made


def is_plain(projection: nn.Module) -> bool:
    """Whether it is weight and bias: a linear layer that nobody wrapped, hooked or distributed."""
    if type(projection) is not nn.Linear or "forward" in projection.__dict__:
        return False
    kinds = {type(projection.weight), type(projection.bias)}
    return kinds <= {nn.Parameter, type(None)} and not _is_hooked(projection)


def _images(projection: nn.Module, like: torch.Tensor, inputs: int) -> Affine:
    """Of the unit vectors, and of zero, which a bias moves."""
    unit = _unit(projection)
    vectors = unit * torch.eye(inputs + 1, inputs, dtype=like.dtype, device=like.device)
    images = projection(vectors)
    # A copy, since a part of the images would hold them all.
    offset = images[inputs].clone()
    # The difference of two numbers in bf16 has more digits than they have.
    wide = torch.promote_types(images.dtype, torch.float32)
    matrix = (images[:inputs].to(wide) - offset.to(wide)) / unit
    return Affine(matrix.T.to(images.dtype).contiguous(), offset)


def _unit(projection: nn.Module) -> float:
    """Length of the unit vectors: 1 where their range may be fixed, as that of quantized inputs."""
    tensors = (*projection.parameters(), *projection.buffers())
    plain = [
        tensor.is_floating_point()
        and tensor.element_size() > 1
        and type(tensor).__module__.partition(".")[0] == "torch"
        for tensor in tensors
    ]
    return _UNIT if plain and all(plain) else 1.0


@torch.no_grad()
def _check_linear(projection: nn.Module, made: Affine, like: torch.Tensor) -> None:
    """ValueError if a vector, long or short and negative, has another image than ``made`` gives.

    Its numbers are alike or zero by chance, which quantized inputs keep, too. Dropout is chance, so
    nothing is said of a module in training.
    """
    on_gpu = like.device.type != "cpu"
    if any(module.training for module in projection.modules()):
        return
    if on_gpu and (projection in _linear or torch.cuda.is_current_stream_capturing()):
        return
    matrix, offset = made.matrix.float(), made.offset
    chance = torch.rand(matrix.shape[1], generator=torch.Generator().manual_seed(_SEED)) < 0.5
    vector = chance.to(like.device, like.dtype)
    for one in (_unit(projection) * vector, -vector):
        image, expected = projection(one[None])[0].float(), matrix @ one.float()
        if offset is not None:
            expected += offset.float()
        tolerance = max(_TOLERANCE, 4 * torch.finfo(made.matrix.dtype).eps)
        # False where an image is not finite: such weights are the model's own affair.
        if (image - expected).norm() > tolerance * expected.norm():
            raise ValueError(
                f"kv_b_proj is a {type(projection).__name__} that is not linear: the image of a "
                "vector is not made of those of its numbers, so latents can't be attended to as "
                "they are; use cache_implementation='dynamic'"
            )
    if on_gpu:
        _linear.add(projection)


def _is_hooked(module: nn.Module) -> bool:
    of_all = module_of_torch._global_forward_hooks or module_of_torch._global_forward_pre_hooks
    return bool(of_all) or any(getattr(module, name) for name in _FORWARD_HOOKS)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Eight bytes at a time where they lie so, which is several times faster to compare."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    aligned = flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0
    return flat.view(torch.int64) if aligned else flat


class _UnknownError(Exception):
    """A module has something of which nobody knows what it does."""


def _state(projection: nn.Module, like: torch.Tensor) -> _State | None:
    """Of the module as it is now, without copies; None where not all of it is known."""
    if like.device.type != "cpu":
        return None
    modes: list[Any] = [like.dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    modes += [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")]
    state = _State(modes, [])
    try:
        for name, module in projection.named_modules(remove_duplicate=False):
            state.values.append((name, type(module), type(module).forward))
            state.values.extend(_values(module, state.tensors))
    except _UnknownError:
        return None
    return state


def _values(module: nn.Module, tensors: list[torch.Tensor]) -> Iterator[Any]:
    cls = type(module)
    known = all(str(one.__module__).startswith(_KNOWN_MODULES) for one in (cls, cls.forward))
    if not known or module.training or _is_hooked(module):
        raise _UnknownError
    own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
    yield from _value(own | module._parameters | module._buffers, tensors)
    yield [(name, child is None) for name, child in module._modules.items()]


def _value(value: Any, tensors: list[torch.Tensor]) -> Iterator[Any]:
    """What can be compared of ``value``: of tensors their form, while they go to ``tensors``."""
    if isinstance(value, torch.Tensor):
        yield from _form(value, tensors)
    elif type(value) in _PLAIN_VALUES:
        yield value
    elif type(value) is dict:
        yield dict, len(value)
        for key in value:
            yield key
            yield from _value(value[key], tensors)
    elif type(value) in (list, tuple):
        yield type(value), len(value)
        for one in value:
            yield from _value(one, tensors)
    else:
        raise _UnknownError


def _form(tensor: Any, tensors: list[torch.Tensor]) -> Iterator[Any]:
    cls = type(tensor)
    yield cls, tensor.shape, tensor.dtype, tensor.requires_grad
    if cls.__module__.startswith(_KNOWN_TENSORS) and hasattr(cls, "__tensor_flatten__"):
        names, rest = tensor.__tensor_flatten__()
        yield from _value({name: getattr(tensor, name) for name in names}, tensors)
        yield from _value(rest, tensors)
    elif cls in _PLAIN_TENSORS and tensor.device.type == "cpu" and tensor.dtype in _PLAIN_DTYPES:
        tensors.append(tensor)
    else:
        raise _UnknownError
