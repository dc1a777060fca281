"""Triton kernel that counts the keys of each centroid."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_masks import mask_bytes, mask_strides

# Tokens of a program.
_TOKENS = 1024


def count_centroids(sign: torch.Tensor, m: int, valid: torch.Tensor | None) -> torch.Tensor:
    batch, heads, length, width = sign.shape
    shape = (batch, heads, width * 8 // m, 1 << m)
    counts = torch.zeros(shape, dtype=torch.int32, device=sign.device)
    _count_kernel[(triton.cdiv(length, _TOKENS), batch * heads, width)](
        sign,
        mask_bytes(valid, sign),
        counts,
        length,
        heads,
        *sign.stride()[:2],
        *mask_strides(valid),
        HAS_VALID=valid is not None,
        M=m,
        BYTES=width,
        BLOCK=_TOKENS,
        enable_fp_fusion=True,
    )
    return counts


@triton.jit(do_not_specialize=["length", "valid_stride_b"])
def _count_kernel(
    sign_ptr,
    valid_ptr,
    counts_ptr,
    length,
    heads,
    sign_stride_b,
    sign_stride_h,
    valid_stride_b,
    valid_stride_n,
    HAS_VALID: tl.constexpr,
    M: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One byte column of a block of tokens: one or two subspaces."""
    CENTROIDS: tl.constexpr = 1 << M
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    column = tl.program_id(2)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token_mask = tokens < length
    if HAS_VALID:
        mask_ptr = valid_ptr + b * valid_stride_b + tokens * valid_stride_n
        token_mask = token_mask & (tl.load(mask_ptr, mask=token_mask, other=0) != 0)
    place = sign_ptr + b * sign_stride_b + h * sign_stride_h + tokens * BYTES + column
    byte = tl.load(place, mask=token_mask, other=0).to(tl.int32)
    # As many bins again: what is not counted goes to the first of those.
    bins = tl.arange(0, 2 * CENTROIDS)
    counts_ptr += tl.program_id(1).to(tl.int64) * (BYTES * 8 // M) * CENTROIDS
    for part in tl.static_range(8 // M):
        ids = (byte >> (part * M)) & (CENTROIDS - 1)
        bin_counts = tl.histogram(tl.where(token_mask, ids, CENTROIDS), 2 * CENTROIDS)
        row_ptr = counts_ptr + (column * (8 // M) + part) * CENTROIDS
        tl.atomic_add(row_ptr + bins, bin_counts, mask=(bins < CENTROIDS) & (bin_counts > 0))
