"""Log-sum-exp of centroids' queries over all keys, in Triton.

A program takes a tile of queries and a part of a piece of keys, and keeps a running softmax's
denominator alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import (
    LOG2_E,
    capped_scores,
    score_factors,
    softmax_lse,
    softmax_step,
    split_plan,
)
from hf_kvret_kernels.centroid.naive import Pieces
from hf_kvret_kernels.centroid.triton_keys import KeyMask, counted_keys, whole_pieces
from hf_kvret_kernels.centroid.triton_products import product_shape, products

# Queries or keys of a tile.
_ROWS = 64
# Programs per multiprocessor to aim at, and the most parts that a piece is cut into for it.
_WAVES = 4
_MOST_SPLITS = 64


def denominators(
    queries: torch.Tensor, pieces: Pieces, mask: KeyMask, scale: float, softcap: float | None
) -> torch.Tensor:
    """``[B, H, C, G]`` fp32 log-sum-exp over all keys; at least -1e30."""
    B, H, C, G, _ = queries.shape
    lse = torch.full((B, H, C * G), float("-inf"), dtype=torch.float32, device=queries.device)
    for start, keys in whole_pieces(pieces):
        P = keys.shape[2]
        tiles = triton.cdiv(C * G, _ROWS)
        splits, split_len = split_plan(
            P, _ROWS, B * H * tiles, lse.device, waves=_WAVES, most=_MOST_SPLITS
        )
        sums = torch.empty(*lse.shape, splits, dtype=torch.float32, device=lse.device)
        _denominators_kernel[(B * H * tiles, splits)](
            queries,
            keys,
            sums,
            *mask.arguments(slice(None)),
            *queries.stride()[:4],
            *keys.stride()[:3],
            H,
            C * G,
            tiles,
            start,
            P,
            split_len,
            *score_factors(scale, softcap, LOG2_E),
            G=G,
            BLOCK_M=_ROWS,
            BLOCK_N=_ROWS,
            SOFTCAP=softcap is not None,
            CAUSAL=mask.positions is not None,
            **product_shape(queries, keys),
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,
        )
        lse = torch.logaddexp(lse, sums.logsumexp(-1))
    return lse.clamp_(min=-1e30).view(B, H, C, G)


@triton.jit(do_not_specialize=["rows", "tiles", "start", "piece", "split_len"])
def _denominators_kernel(
    query_ptr,
    key_ptr,
    sums_ptr,
    valid_ptr,
    valid_stride_b,
    valid_stride_n,
    limits_ptr,
    limits_stride_b,
    limits_stride_c,
    query_stride_b,
    query_stride_h,
    query_stride_c,
    query_stride_g,
    key_stride_b,
    key_stride_h,
    key_stride_n,
    heads,
    rows,
    tiles,
    start,
    piece,
    split_len,
    inner,
    outer,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """The log-sum-exp of a tile of queries, rows ``c * G + g``, over a part of a piece of keys."""
    index = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = index // heads, index % heads
    here = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = here < rows
    query_rows = query_ptr + b * query_stride_b + h * query_stride_h
    query_rows += (here // G) * query_stride_c + (here % G) * query_stride_g
    limits = here
    if CAUSAL:
        limits_ptr += b * limits_stride_b
        limits = tl.load(limits_ptr + here // G * limits_stride_c, mask=row_mask, other=-1)
    key_ptr += b * key_stride_b + h * key_stride_h
    valid_ptr += b * valid_stride_b

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    first = tl.program_id(1) * split_len
    last = tl.minimum(first + split_len, piece)
    for begin in range(first, last, BLOCK_N):
        places = (begin + tl.arange(0, BLOCK_N)).to(tl.int64)
        inside = places < last
        key_rows = key_ptr + places * key_stride_n
        dots = products(
            query_rows, row_mask, key_rows, inside, D, BLOCK_D, BLOCK_M, BLOCK_N, DOT_DTYPE
        )
        score_mask = counted_keys(valid_ptr, valid_stride_n, limits, start + places, inside, CAUSAL)
        scores = capped_scores(dots, inner, outer, SOFTCAP)
        scores = tl.where(score_mask, scores, float("-inf"))
        _, _, peak, total = softmax_step(scores, peak, total)
    target = (index * rows + here) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + target, softmax_lse(peak, total), mask=row_mask)
