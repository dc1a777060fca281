"""Masks ``[B, n]`` of valid tokens as arguments of kernels, which may go without one."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

# Bytes that a load takes at once where rows begin at multiples of them.
_UNIT = 16


def mask_bytes(valid: torch.Tensor | None, unread: torch.Tensor) -> torch.Tensor:
    """The mask as bytes; where there is none ``unread``, since an argument must be some pointer."""
    return unread if valid is None else valid.view(torch.uint8)


def mask_strides(valid: torch.Tensor | None) -> tuple[int, int]:
    """Strides of rows of the batch and of tokens; zeros where there is no mask."""
    return (0, 0) if valid is None else (valid.stride(0), valid.stride(1))


def mask_layout(valid: torch.Tensor | None) -> tuple[int, int, int]:
    """Stride of the batch's rows in units, stride of tokens, and the bytes of a unit.

    Rows begin at multiples of a unit and can be read to the end of their last one, though it may
    lie behind the mask: told to the compiler, this makes wide loads.
    """
    if valid is None:
        return 0, 0, 1
    row = valid.stride(0) if len(valid) > 1 else 0
    units = -(-valid.shape[1] // _UNIT)
    end = valid.storage_offset() + row * (len(valid) - 1) + units * _UNIT
    whole = valid.stride(1) == 1 and row % _UNIT == 0 and end <= valid.untyped_storage().nbytes()
    unit = _UNIT if whole else 1
    return row // unit, valid.stride(1), unit


@triton.jit
def load_mask(mask_ptr, b, tokens, length, stride_b, stride_n, UNIT: tl.constexpr):
    """Which of ``tokens [N]`` of row ``b``, an int64, are valid; none from ``length`` on.

    The strides and UNIT are those of ``mask_layout``.
    """
    mask_ptr += b * stride_b * UNIT + tokens.to(tl.int64) * stride_n
    readable = tokens < tl.cdiv(length, UNIT) * UNIT
    return (tl.load(mask_ptr, mask=readable, other=0) != 0) & (tokens < length)
