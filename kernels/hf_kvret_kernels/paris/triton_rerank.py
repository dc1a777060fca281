"""Triton kernel of stage 2: gather code rows, unpack, inner products with all G queries."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import capped_scores, score_factors
from hf_kvret_kernels.paris.codes import LEVELS, ParisCodes

# Coordinates that a program of four warps holds in registers.
_TILE = 4096


def rerank(
    q_rot: torch.Tensor,
    codes: ParisCodes,
    ids: torch.Tensor,
    levels: torch.Tensor,
    m: int,
    scale: float,
    softcap: float | None,
    offset: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, queries, tables, dim = q_rot.shape
    count = ids.shape[-1]
    shape = (batch, heads, queries, tables, count)
    out = torch.empty(shape, dtype=torch.float32, device=q_rot.device)
    block = _TILE // dim
    _rerank_kernel[(triton.cdiv(count, block), batch * heads * queries)](
        q_rot.contiguous(),
        codes.sign,
        codes.magnitude,
        codes.weight,
        ids.contiguous(),
        levels.contiguous(),
        levels if offset is None else offset.contiguous(),
        out,
        *score_factors(scale, softcap),
        count,
        heads,
        queries,
        *codes.sign.stride()[:2],
        *codes.magnitude.stride()[:2],
        *codes.weight.stride()[:2],
        HAS_OFFSET=offset is not None,
        SOFTCAP=softcap is not None,
        TABLES=tables,
        M=m,
        LEVELS=LEVELS,
        DIM=dim,
        BLOCK=block,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _rerank_kernel(
    q_ptr,
    sign_ptr,
    magnitude_ptr,
    weight_ptr,
    ids_ptr,
    levels_ptr,
    offset_ptr,
    out_ptr,
    inner,
    outer,
    count,
    heads,
    queries,
    sign_stride_b,
    sign_stride_h,
    magnitude_stride_b,
    magnitude_stride_h,
    weight_stride_b,
    weight_stride_h,
    HAS_OFFSET: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TABLES: tl.constexpr,
    M: tl.constexpr,
    LEVELS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BYTES: tl.constexpr = DIM // 8
    row = tl.program_id(1).to(tl.int64)
    b = row // queries // heads
    h = row // queries % heads
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + row * count + slots, mask=slots < count, other=-1).to(tl.int64)
    id_mask = (ids >= 0)[:, None]

    # A thread holds whole bytes of signs. Their eight coordinates are taken one after the other, so
    # that nothing crosses threads before the sums over a key.
    byte_ids = tl.arange(0, BYTES)[None, :]
    places = ids[:, None] * BYTES + byte_ids
    sign_ptr += b * sign_stride_b + h * sign_stride_h
    magnitude_ptr += b * magnitude_stride_b + h * magnitude_stride_h
    weight_ptr += b * weight_stride_b + h * weight_stride_h
    byte = tl.load(sign_ptr + places, mask=id_mask, other=0).to(tl.int32)
    word = tl.zeros((BLOCK, BYTES), dtype=tl.int32)
    for i in tl.static_range(3):
        part = tl.load(magnitude_ptr + 3 * places + i, mask=id_mask, other=0).to(tl.int32)
        word += part << (8 * i)
    # Of the byte's subspace, or of its two.
    PER_BYTE: tl.constexpr = 8 // M
    low = tl.load(weight_ptr + places * PER_BYTE, mask=id_mask, other=0.0).to(tl.float32)
    high = low
    if PER_BYTE == 2:
        high = tl.load(weight_ptr + places * 2 + 1, mask=id_mask, other=0.0).to(tl.float32)

    for first in tl.static_range(0, TABLES, 4):
        sum0 = tl.zeros((BLOCK, BYTES), dtype=tl.float32)
        sum1 = sum0
        sum2 = sum0
        sum3 = sum0
        q = q_ptr + (row * TABLES + first) * DIM + 8 * byte_ids
        for j in tl.static_range(8):
            level = tl.load(levels_ptr + ((word >> (3 * j)) & (LEVELS - 1)))
            v = tl.where(((byte >> j) & 1) == 1, level, -level)
            if PER_BYTE == 2:
                v *= low if j < 4 else high
            sum0 += v * tl.load(q + j)
            if first + 1 < TABLES:
                sum1 += v * tl.load(q + DIM + j)
            if first + 2 < TABLES:
                sum2 += v * tl.load(q + 2 * DIM + j)
            if first + 3 < TABLES:
                sum3 += v * tl.load(q + 3 * DIM + j)
        for g in tl.static_range(4):
            if first + g < TABLES:
                total = sum0 if g == 0 else sum1 if g == 1 else sum2 if g == 2 else sum3
                if PER_BYTE == 1:
                    total *= low
                estimate = tl.sum(total, axis=1)
                table = row * TABLES + first + g
                if HAS_OFFSET:
                    estimate += tl.load(offset_ptr + table)
                estimate = capped_scores(estimate, inner, outer, SOFTCAP)
                estimate = tl.where(ids >= 0, estimate, float("-inf"))
                tl.store(out_ptr + table * count + slots, estimate, mask=slots < count)
