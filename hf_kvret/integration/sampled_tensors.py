"""Numbers and bytes at fixed places of any tensor: what a weight is known by."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SAMPLED_NUMBERS = 16

# Prime of Knuth's multiplicative hash: its multiples modulo the size are spread evenly.
_STRIDE = 2_654_435_761
# Of as many bytes; not every operation knows all dtypes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unreadable(parameter: torch.Tensor) -> str:
    """Why single numbers of a parameter can't be read; empty if they can."""
    if type(parameter) not in (nn.Parameter, torch.Tensor):
        return f"kept as {type(parameter).__name__}"
    if parameter.dtype not in FLOATS:
        return f"quantized ({str(parameter.dtype).removeprefix('torch.')})"
    if parameter.device.type == "meta":
        return "offloaded"
    return ""


def plain_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that hold ``tensor``, by the name of the part; empty if none can be read.

    A plain tensor is its own part, named ``""``. Shards are not read: they differ by rank.
    """
    if hasattr(tensor, "device_mesh"):
        return {}
    if hasattr(tensor, "__tensor_flatten__"):
        inner = {name: getattr(tensor, name, None) for name in tensor.__tensor_flatten__()[0]}
        return {
            f"{name}.{part}" if part else name: one
            for name, value in inner.items()
            if isinstance(value, torch.Tensor)
            for part, one in plain_parts(value).items()
        }
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wraps or tensor.device.type == "meta" or tensor.layout != torch.strided:
        return {}
    return {"": tensor.detach().as_subclass(torch.Tensor)}


def sampled_bytes(tensors: Iterable[torch.Tensor]) -> bytes:
    """Of each plain tensor, 16 numbers at fixed places as bytes; waits once for a device."""
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        numbers = _taken(tensor, SAMPLED_NUMBERS)
        parts.setdefault(tensor.device, []).append(numbers.view(torch.uint8))
    return b"".join(torch.cat(part).cpu().numpy().tobytes() for part in parts.values())


def some_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """16 bytes ``[16]`` uint8 at fixed places of a plain tensor, on the CPU."""
    return _taken(tensor, SAMPLED_NUMBERS // tensor.element_size()).view(torch.uint8).cpu()


def some_numbers(parameter: torch.Tensor) -> torch.Tensor:
    """``[16]`` numbers of a parameter, fp32, on the CPU."""
    return parameter.detach().take(_places(parameter, SAMPLED_NUMBERS)).float().cpu()


def _taken(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` numbers at fixed places, as integers of their size."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).take(_places(tensor, count))


def _places(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, device=tensor.device) * _STRIDE % tensor.numel()
