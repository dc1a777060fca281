"""Centroid lists in Triton: scores, shares of the softmax and group maximum in one kernel.

A first reading of the keys leaves the log-sum-exp of each query; where a head has one query alone
it is not needed. In a second one each piece of keys meets some centroids: the largest of a group's
log-shares is written beside the best found so far, and the best of both stay.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import capped_scores, score_factors
from hf_kvret_kernels.centroid.naive import Pieces
from hf_kvret_kernels.centroid.triton_denominators import denominators
from hf_kvret_kernels.centroid.triton_keys import KeyMask, counted_keys, whole_pieces
from hf_kvret_kernels.centroid.triton_products import product_shape, products
from hf_kvret_kernels.top_k.triton import top_k

# fp32 scores held at once where the caller does not say: 64 MiB.
_MOST_SCORES = 1 << 24
# Centroids or keys of a tile.
_ROWS = 64


def top_keys(
    queries: torch.Tensor,
    pieces: Pieces,
    count: int,
    valid: torch.Tensor,
    positions: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    most_scores: int | None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.top_keys``. Of equal keys the first are taken."""
    B, H, C, G, _ = queries.shape
    values = torch.full((B, H, C, count), float("-inf"), dtype=torch.float32, device=queries.device)
    ids = torch.full((B, H, C, count), -1, dtype=torch.int32, device=queries.device)
    if ids.numel() == 0:
        return ids
    if queries.stride(4) != 1:
        queries = queries.contiguous()
    mask = KeyMask(valid, positions)
    lse = None if G == 1 else denominators(queries, pieces, mask, scale, softcap)
    most = most_scores or _MOST_SCORES
    for start, keys in whole_pieces(pieces):
        width = count + keys.shape[2]
        step = max(1, most // (B * H * width))
        for first in range(0, C, step):
            part = slice(first, first + step)
            scores = values.new_empty(*values[:, :, part].shape[:3], width)
            scores[..., :count] = values[:, :, part]
            _write_relevance(
                scores[..., count:], queries, keys, start, mask, lse, part, scale, softcap
            )
            # Ascending positions: what was found before comes first, and tokens stay in order.
            best = top_k(scores, count)
            absent, places = best < 0, best.clamp(min=0).long()
            values[:, :, part] = scores.gather(-1, places).masked_fill_(absent, float("-inf"))
            older = ids[:, :, part].gather(-1, places.clamp(max=count - 1))
            result = torch.where(best < count, older, best + (start - count))
            ids[:, :, part] = result.masked_fill_(absent, -1)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def _write_relevance(
    result: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    start: int,
    mask: KeyMask,
    lse: torch.Tensor | None,
    part: slice,
    scale: float,
    softcap: float | None,
) -> None:
    """Fill ``result [B, H, c, P]``, a view with its last dimension contiguous."""
    B, H, C, P = result.shape
    some = queries[:, :, part]
    row_blocks, key_blocks = triton.cdiv(C, _ROWS), triton.cdiv(P, _ROWS)
    _relevance_kernel[(B * H * row_blocks * key_blocks,)](
        some,
        keys,
        # A pointer that the kernel ignores where there is one query for each head.
        result if lse is None else lse[:, :, part],
        result,
        *mask.arguments(part),
        *some.stride()[:4],
        *keys.stride()[:3],
        0 if lse is None else lse.stride(1),
        *result.stride()[1:3],
        H,
        C,
        row_blocks,
        key_blocks,
        start,
        P,
        *score_factors(scale, softcap),
        G=queries.shape[3],
        BLOCK_M=_ROWS,
        BLOCK_N=_ROWS,
        SOFTCAP=softcap is not None,
        CAUSAL=mask.positions is not None,
        HAS_LSE=lse is not None,
        **product_shape(queries, keys),
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["centroids", "row_blocks", "key_blocks", "start", "piece"])
def _relevance_kernel(
    query_ptr,
    key_ptr,
    lse_ptr,
    found_ptr,
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
    lse_stride_h,
    found_stride_h,
    found_stride_c,
    heads,
    centroids,
    row_blocks,
    key_blocks,
    start,
    piece,
    inner,
    outer,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_LSE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """The largest ``score - lse`` of G queries, for a block of centroids and one of keys."""
    pair = tl.program_id(0) // key_blocks
    index = (pair // row_blocks).to(tl.int64)
    b, h = index // heads, index % heads
    here = (pair % row_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = here < centroids
    places = (tl.program_id(0) % key_blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = places < piece
    key_rows = key_ptr + b * key_stride_b + h * key_stride_h + places * key_stride_n
    limits = here
    if CAUSAL:
        limits_ptr += b * limits_stride_b
        limits = tl.load(limits_ptr + here * limits_stride_c, mask=row_mask, other=-1)
    valid_ptr += b * valid_stride_b
    score_mask = counted_keys(valid_ptr, valid_stride_n, limits, start + places, inside, CAUSAL)
    query_ptr += b * query_stride_b + h * query_stride_h
    lse_ptr += index * lse_stride_h
    best = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)
    for g in range(G):
        query_rows = query_ptr + here * query_stride_c + g * query_stride_g
        dots = products(
            query_rows, row_mask, key_rows, inside, D, BLOCK_D, BLOCK_M, BLOCK_N, DOT_DTYPE
        )
        shares = capped_scores(dots, inner, outer, SOFTCAP)
        if HAS_LSE:
            shares -= tl.load(lse_ptr + here * G + g, mask=row_mask, other=0.0)[:, None]
        best = tl.maximum(best, shares)
    best = tl.where(score_mask, best, float("-inf"))
    found_ptr += index * found_stride_h
    tl.store(
        found_ptr + here[:, None] * found_stride_c + places[None, :],
        best,
        mask=row_mask[:, None] & inside[None, :],
    )
