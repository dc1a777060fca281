"""Triton kernel of stage 2 for long rows and large groups: both are taken in pieces.

As ``triton_rerank``, whose threads hold whole codes and whose loop over queries is unrolled.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_log_sums import log_sum_exps
from hf_kvret_kernels._triton_rows import load_ids
from hf_kvret_kernels._triton_shared import capped_scores, score_factors
from hf_kvret_kernels.paris.codes import LEVELS, ParisCodes
from hf_kvret_kernels.paris.triton_levels import pairs_of_levels, split_words

# Bytes of signs and query tables up to which a program takes all of them at once.
_WHOLE = 32
_TABLES = 16
# Coordinates that a program of four warps holds in registers; bytes of signs of a piece at most,
# and of a thread.
_TILE = 8192
_PIECE = 16
_INNER = 4


def is_wide(width: int, tables: int) -> bool:
    """Whether codes of ``width`` bytes of signs, or so many queries, are taken in pieces."""
    return width > _WHOLE or width & (width - 1) != 0 or tables > _TABLES


def rerank(
    queries: torch.Tensor,
    codes: ParisCodes,
    ids: torch.Tensor,
    levels: torch.Tensor,
    m: int,
    scale: float,
    softcap: float | None,
    offset: torch.Tensor | None,
    in_words: bool,
    magnitude: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and log-sums of ``triton_rerank.Estimates``; there are tokens."""
    batch, heads, count, tables, _, width = queries.shape
    candidates = ids.shape[-1]
    # The largest power of two that divides the width: pieces of a row are all alike.
    piece = min(_PIECE, width & -width)
    block = _TILE // (8 * piece)
    blocks = triton.cdiv(candidates, block)
    lead = batch, heads, count, tables
    scores = torch.empty(*lead, candidates, dtype=torch.float32, device=queries.device)
    log_sums = torch.empty(*lead, blocks, dtype=torch.float32, device=queries.device)
    if scores.numel():
        _rerank_wide_kernel[(blocks, batch * heads * count)](
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
            IN_WORDS=in_words and piece % 4 == 0,
            HAS_OFFSET=offset is not None,
            SOFTCAP=softcap is not None,
            TABLES=tables,
            M=m,
            LEVELS=LEVELS,
            ROWS=min(_TABLES, triton.next_power_of_2(tables)),
            BYTES=width,
            PIECE=piece,
            INNER=min(_INNER, piece),
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return scores, log_sums


@triton.jit(do_not_specialize=["count", "tokens"])
def _rerank_wide_kernel(
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
    PIECE: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of candidates: four queries after each other, and for these piece after piece."""
    DIM: tl.constexpr = 8 * BYTES
    PER_BYTE: tl.constexpr = 8 // M
    SHAPE: tl.constexpr = (BLOCK, PIECE // INNER, INNER)
    row = tl.program_id(1).to(tl.int64)
    b = row // queries // heads
    h = row // queries % heads
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids, id_mask = load_ids(ids_ptr + row * count, slots, slots < count, 1, tokens)
    byte_ids = tl.arange(0, PIECE // INNER)[:, None] * INNER + tl.arange(0, INNER)[None, :]
    byte_ids = byte_ids[None, :, :]
    # Of the first token where there is none: what comes of it is dropped.
    rows = tl.where(id_mask, ids, 0).to(tl.int64)
    places = rows[:, None, None] * BYTES + byte_ids
    sign_ptr += b * sign_stride_b + h * sign_stride_h
    magnitude_ptr += b * magnitude_stride_b + h * magnitude_stride_h
    weight_ptr += b * weight_stride_b + h * weight_stride_h
    pairs = pairs_of_levels(levels_ptr, LEVELS)
    last = row * TABLES + TABLES - 1
    for first in range(0, TABLES, 4):
        sum0 = tl.zeros(SHAPE, dtype=tl.float32)
        sum1 = sum0
        sum2 = sum0
        sum3 = sum0
        # Of the last query where there are no more.
        q0 = q_ptr + (row * TABLES + first) * DIM
        q1 = q_ptr + tl.minimum(row * TABLES + first + 1, last) * DIM
        q2 = q_ptr + tl.minimum(row * TABLES + first + 2, last) * DIM
        q3 = q_ptr + tl.minimum(row * TABLES + first + 3, last) * DIM
        for start in range(0, BYTES, PIECE):
            byte = tl.load(sign_ptr + places + start).to(tl.int32)
            if IN_WORDS:
                word = split_words(magnitude_ptr + 3 * (start // 4), rows, BYTES, PIECE)
            else:
                word = tl.zeros(SHAPE, dtype=tl.int32)
                for i in tl.static_range(3):
                    part = tl.load(magnitude_ptr + 3 * (places + start) + i).to(tl.int32)
                    word += part << (8 * i)
            # Of the byte's subspace, or of its two.
            low = tl.load(weight_ptr + (places + start) * PER_BYTE).to(tl.float32)
            high = low
            if PER_BYTE == 2:
                high = tl.load(weight_ptr + (places + start) * 2 + 1).to(tl.float32)
            for half in tl.static_range(4):
                numbers = tl.reshape((word >> (6 * half)) & (LEVELS * LEVELS - 1), (BLOCK * PIECE,))
                pair = tl.reshape(tl.gather(pairs, numbers, 0), SHAPE)
                for odd in tl.static_range(2):
                    level = (pair >> (32 * odd)).to(tl.uint32)
                    # A sign bit of 0 in the code makes the level negative.
                    turn = (~byte << (31 - 2 * half - odd)).to(tl.uint32, bitcast=True) & 0x80000000
                    v = (level ^ turn).to(tl.float32, bitcast=True)
                    v *= low if half < 2 else high
                    plane = (2 * half + odd) * BYTES + start + byte_ids
                    sum0 += v * tl.load(q0 + plane)
                    sum1 += v * tl.load(q1 + plane)
                    sum2 += v * tl.load(q2 + plane)
                    sum3 += v * tl.load(q3 + plane)
        for g in tl.static_range(4):
            total = sum0 if g == 0 else sum1 if g == 1 else sum2 if g == 2 else sum3
            estimate = tl.sum(tl.sum(total, axis=2), axis=1)
            table = row * TABLES + first + g
            if HAS_OFFSET:
                estimate += tl.load(offset_ptr + tl.minimum(table, last))
            estimate = capped_scores(estimate, inner, outer, SOFTCAP)
            estimate = tl.where(id_mask, estimate, float("-inf"))
            # None where there is no such query.
            inside = slots < tl.where(table <= last, count, 0)
            tl.store(scores_ptr + table * count + slots, estimate, mask=inside)

    # Read back by all threads: above, several hold the same key.
    tl.debug_barrier()
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for start in range(0, TABLES, ROWS):
        tables = start + tl.arange(0, ROWS)
        score_mask = (tables < TABLES)[:, None] & (slots < count)[None, :]
        place = scores_ptr + (row * TABLES + tables)[:, None] * count + slots[None, :]
        scores = tl.load(place, mask=score_mask, other=float("-inf"))
        place = sums_ptr + (row * TABLES + tables) * tl.num_programs(0) + tl.program_id(0)
        tl.store(place, log_sum_exps(scores), mask=tables < TABLES)
