"""Triton kernel of stage 2: gather code rows, unpack, inner products with all G queries."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_log_sums import log_sum_exps
from hf_kvret_kernels._triton_rows import load_ids
from hf_kvret_kernels._triton_shared import capped_scores, score_factors
from hf_kvret_kernels.paris import triton_rerank_wide
from hf_kvret_kernels.paris.codes import LEVELS, ParisCodes
from hf_kvret_kernels.paris.triton_levels import pairs_of_levels, split_words

# Coordinates that a program of four warps holds in registers, and bytes of signs of a thread.
_TILE = 16384
_INNER = 4


class Estimates(NamedTuple):
    """Of the candidates.

    Attributes:
        scores: ``[B, H, Q, G, C]`` fp32, -inf for ids of -1.
        log_sums: ``[B, H, Q, G, blocks]`` fp32, log-sum-exps of blocks of scores.
    """

    scores: torch.Tensor
    log_sums: torch.Tensor


def rerank(
    queries: torch.Tensor,
    codes: ParisCodes,
    ids: torch.Tensor,
    levels: torch.Tensor,
    m: int,
    scale: float,
    softcap: float | None,
    offset: torch.Tensor | None,
) -> Estimates:
    """See ``hf_kvret_kernels.paris.rerank``; ``queries`` as of ``triton_bonus.Bonus``."""
    batch, heads, count, tables, _, width = queries.shape
    candidates = ids.shape[-1]
    lead = batch, heads, count, tables
    if not codes.sign.shape[2]:
        nothing = torch.full((*lead, candidates), -math.inf, device=queries.device)
        return Estimates(nothing, nothing[..., :1])
    magnitude = codes.magnitude
    # Their words are those of four bytes of signs.
    places = (*magnitude.stride()[:2], magnitude.storage_offset(), magnitude.data_ptr())
    in_words = width % 4 == 0 and all(place % 4 == 0 for place in places)
    if in_words:
        magnitude = magnitude.view(torch.int32)
    if triton_rerank_wide.is_wide(width, tables):
        options = (m, scale, softcap, offset, in_words, magnitude)
        return Estimates(*triton_rerank_wide.rerank(queries, codes, ids, levels, *options))
    block = _TILE // (8 * width)
    blocks = triton.cdiv(candidates, block)
    scores = torch.empty(*lead, candidates, dtype=torch.float32, device=queries.device)
    log_sums = torch.empty(*lead, blocks, dtype=torch.float32, device=queries.device)
    if scores.numel():
        _rerank_kernel[(blocks, batch * heads * count)](
            queries,
            codes.sign,
            magnitude,
            codes.weight,
            ids.contiguous(),
            levels.contiguous(),
            levels if offset is None else offset.contiguous(),
            scores,
            log_sums,
            *score_factors(scale, softcap),
            candidates,
            codes.sign.shape[2],
            heads,
            count,
            *codes.sign.stride()[:2],
            *magnitude.stride()[:2],
            *codes.weight.stride()[:2],
            IN_WORDS=in_words,
            HAS_OFFSET=offset is not None,
            SOFTCAP=softcap is not None,
            TABLES=tables,
            M=m,
            LEVELS=LEVELS,
            ROWS=triton.next_power_of_2(tables),
            BYTES=width,
            INNER=min(_INNER, width),
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return Estimates(scores, log_sums)


@triton.jit(do_not_specialize=["count", "tokens"])
def _rerank_kernel(
    q_ptr,
    sign_ptr,
    magnitude_ptr,
    weight_ptr,
    ids_ptr,
    levels_ptr,
    offset_ptr,
    scores_ptr,
    sums_ptr,
    inner,
    outer,
    count,
    tokens,
    heads,
    queries,
    sign_stride_b,
    sign_stride_h,
    magnitude_stride_b,
    magnitude_stride_h,
    weight_stride_b,
    weight_stride_h,
    IN_WORDS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TABLES: tl.constexpr,
    M: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    DIM: tl.constexpr = 8 * BYTES
    PER_BYTE: tl.constexpr = 8 // M
    SHAPE: tl.constexpr = (BLOCK, BYTES // INNER, INNER)
    row = tl.program_id(1).to(tl.int64)
    b = row // queries // heads
    h = row // queries % heads
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids, id_mask = load_ids(ids_ptr + row * count, slots, slots < count, 1, tokens)

    # A thread holds whole bytes of signs. Their eight coordinates are taken one after the other, so
    # that nothing crosses threads before the sums over a key; and as many bytes in a row as make
    # loads of the queries 16 bytes wide, for several keys at once.
    byte_ids = tl.arange(0, BYTES // INNER)[:, None] * INNER + tl.arange(0, INNER)[None, :]
    byte_ids = byte_ids[None, :, :]
    # Of the first token where there is none: what comes of it is dropped.
    rows = tl.where(id_mask, ids, 0).to(tl.int64)
    places = rows[:, None, None] * BYTES + byte_ids
    sign_ptr += b * sign_stride_b + h * sign_stride_h
    magnitude_ptr += b * magnitude_stride_b + h * magnitude_stride_h
    weight_ptr += b * weight_stride_b + h * weight_stride_h
    byte = tl.load(sign_ptr + places).to(tl.int32)
    if IN_WORDS:
        word = split_words(magnitude_ptr, rows, BYTES, BYTES)
    else:
        word = tl.zeros(SHAPE, dtype=tl.int32)
        for i in tl.static_range(3):
            part = tl.load(magnitude_ptr + 3 * places + i).to(tl.int32)
            word += part << (8 * i)
    # Of the byte's subspace, or of its two.
    low = tl.load(weight_ptr + places * PER_BYTE).to(tl.float32)
    high = low
    if PER_BYTE == 2:
        high = tl.load(weight_ptr + places * 2 + 1).to(tl.float32)

    pairs = pairs_of_levels(levels_ptr, LEVELS)
    for first in tl.static_range(0, TABLES, 4):
        sum0 = tl.zeros(SHAPE, dtype=tl.float32)
        sum1 = sum0
        sum2 = sum0
        sum3 = sum0
        q = q_ptr + (row * TABLES + first) * DIM + byte_ids
        for half in tl.static_range(4):
            numbers = tl.reshape((word >> (6 * half)) & (LEVELS * LEVELS - 1), (BLOCK * BYTES,))
            pair = tl.reshape(tl.gather(pairs, numbers, 0), SHAPE)
            for odd in tl.static_range(2):
                level = (pair >> (32 * odd)).to(tl.uint32)
                # A sign bit of 0 in the code makes the level negative.
                turn = (~byte << (31 - 2 * half - odd)).to(tl.uint32, bitcast=True) & 0x80000000
                v = (level ^ turn).to(tl.float32, bitcast=True)
                if PER_BYTE == 2:
                    v *= low if half < 2 else high
                place = q + (2 * half + odd) * BYTES
                sum0 += v * tl.load(place)
                if first + 1 < TABLES:
                    sum1 += v * tl.load(place + DIM)
                if first + 2 < TABLES:
                    sum2 += v * tl.load(place + 2 * DIM)
                if first + 3 < TABLES:
                    sum3 += v * tl.load(place + 3 * DIM)
        for g in tl.static_range(4):
            if first + g < TABLES:
                total = sum0 if g == 0 else sum1 if g == 1 else sum2 if g == 2 else sum3
                if PER_BYTE == 1:
                    total *= low
                estimate = tl.sum(tl.sum(total, axis=2), axis=1)
                table = row * TABLES + first + g
                if HAS_OFFSET:
                    estimate += tl.load(offset_ptr + table)
                estimate = capped_scores(estimate, inner, outer, SOFTCAP)
                estimate = tl.where(id_mask, estimate, float("-inf"))
                tl.store(scores_ptr + table * count + slots, estimate, mask=slots < count)

    # Read back by all threads: above, several hold the same key.
    tl.debug_barrier()
    tables = tl.arange(0, ROWS)
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    score_mask = (tables < TABLES)[:, None] & (slots < count)[None, :]
    place = scores_ptr + (row * TABLES + tables)[:, None] * count + slots[None, :]
    scores = tl.load(place, mask=score_mask, other=float("-inf"))
    place = sums_ptr + (row * TABLES + tables) * tl.num_programs(0) + tl.program_id(0)
    tl.store(place, log_sum_exps(scores), mask=tables < TABLES)
