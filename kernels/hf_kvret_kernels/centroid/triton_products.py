"""Inner products of two tiles of rows, which the Triton kernels of this folder share."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import dot_dtype

# Numbers of a row that are multiplied at a time. fp32 takes many registers: more of it would spill.
_NARROW = 128
_WIDE = 32


def product_shape(left: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
    """``D``, ``BLOCK_D`` and ``DOT_DTYPE`` of ``products`` for rows of these tensors.

    Where their dtypes differ both become fp32, so that nothing is rounded.
    """
    same = left.dtype == right.dtype
    width = left.shape[-1]
    most = _NARROW if same and left.element_size() == 2 else _WIDE
    return {
        "D": width,
        "BLOCK_D": max(16, min(most, triton.next_power_of_2(width))),
        "DOT_DTYPE": dot_dtype(left.dtype) if same else tl.float32,
    }


@triton.jit
def products(  # type: ignore[no-untyped-def]
    left_rows,
    left_mask,
    right_rows,
    right_mask,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """``[M, N]`` fp32 of rows of D contiguous numbers at ``left_rows [M]`` and ``right_rows [N]``.

    0 for rows outside the masks. Tensor cores multiply fp32 in three parts, as good as fp32.
    """
    dots = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, D, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)
        inside = (columns < D)[None, :]
        left = tl.load(
            left_rows[:, None] + columns[None, :], mask=left_mask[:, None] & inside, other=0.0
        )
        right = tl.load(
            right_rows[:, None] + columns[None, :], mask=right_mask[:, None] & inside, other=0.0
        )
        dots = tl.dot(
            left.to(DOT_DTYPE), tl.trans(right).to(DOT_DTYPE), dots, input_precision="tf32x3"
        )
    return dots
