"""Triton kernels that make centroid lists: scores, softmax and group maximum in one go.

A first reading of the keys leaves the log-sum-exp of each query; where a head has one query alone
it is not needed. In a second one each piece of keys meets some centroids: the largest of a group's
log-shares is written beside the best found so far, and the best of both stay.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import (
    LN_2,
    base2_scores,
    device_limits,
    dot_dtype,
    load_rows,
    score_factors,
    softmax_step,
)
from hf_kvret_kernels.centroid.naive import Pieces
from hf_kvret_kernels.proxy import triton_top_k

# fp32 scores held at once where the caller does not say: 64 MiB.
_MOST_SCORES = 1 << 24
# Bytes of a tile of queries or keys, and the most of them.
_TILE_BYTES = 16 << 10
_MOST_ROWS = 64
# Programs per multiprocessor to aim at, and the most pieces that keys are cut into for it.
_WAVES = 4
_MOST_SPLITS = 64


@dataclass(frozen=True, eq=False)
class _Mask:
    """Which keys count for which centroids.

    Attributes:
        valid: ``[B, n]`` bool.
        positions: ``[B, C]``, the last slot that a centroid sees, or None.
    """

    valid: torch.Tensor
    positions: torch.Tensor | None

    def arguments(self, part: slice) -> tuple[Any, ...]:
        """Of a kernel, for the centroids ``part``; it ignores the last three where all see all."""
        valid = self.valid.view(torch.uint8)
        limits = valid if self.positions is None else self.positions[:, part]
        return valid, *valid.stride(), limits, *limits.stride()


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
    values = torch.full((B, H, C, count), float("-inf"), device=queries.device)
    ids = torch.full((B, H, C, count), -1, dtype=torch.int32, device=queries.device)
    if ids.numel() == 0:
        return ids
    if queries.stride(4) != 1:
        queries = queries.contiguous()
    mask = _Mask(valid, positions)
    lse = None if G == 1 else _denominators(queries, pieces, mask, scale, softcap)
    most = most_scores or _MOST_SCORES
    for start, keys in _readable(pieces):
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
            taken = triton_top_k.top_k(scores, count)
            missing, places = taken < 0, taken.clamp(min=0).long()
            values[:, :, part] = scores.gather(-1, places).masked_fill_(missing, float("-inf"))
            older = ids[:, :, part].gather(-1, places.clamp(max=count - 1))
            found = torch.where(taken < count, older, taken + (start - count))
            ids[:, :, part] = found.masked_fill_(missing, -1)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def _readable(pieces: Pieces) -> Any:
    """Pieces that are not empty, their keys contiguous in the last dimension."""
    for start, keys in pieces():
        if keys.shape[2]:
            yield start, keys if keys.stride(3) == 1 else keys.contiguous()


def _tiles(queries: torch.Tensor, keys: torch.Tensor) -> tuple[int, int, Any]:
    """Width of a tile of both, its rows, and the dtype in which they are multiplied."""
    block_d = max(16, triton.next_power_of_2(keys.shape[3]))
    itemsize = max(queries.element_size(), keys.element_size())
    rows = max(16, min(_MOST_ROWS, _TILE_BYTES // (block_d * itemsize)))
    same = queries.dtype == keys.dtype
    return block_d, rows, dot_dtype(keys.dtype) if same else tl.float32


def _denominators(
    queries: torch.Tensor, pieces: Pieces, mask: _Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    """``[B, H, C, G]`` fp32 log-sum-exp over all keys; at least -1e30."""
    B, H, C, G, D = queries.shape
    lse = torch.full((B, H, C * G), float("-inf"), device=queries.device)
    processors, _ = device_limits(queries.device)
    for start, keys in _readable(pieces):
        block_d, block, dtype = _tiles(queries, keys)
        P = keys.shape[2]
        tiles, blocks = triton.cdiv(C * G, block), triton.cdiv(P, block)
        splits = max(1, min(_MOST_SPLITS, blocks, _WAVES * processors // (B * H * tiles)))
        split_len = triton.cdiv(blocks, splits) * block
        splits = triton.cdiv(P, split_len)
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
            *score_factors(scale, softcap),
            G=G,
            D=D,
            BLOCK_D=block_d,
            BLOCK_M=block,
            BLOCK_N=block,
            SOFTCAP=softcap is not None,
            CAUSAL=mask.positions is not None,
            DOT_DTYPE=dtype,
            num_warps=4,
            num_stages=2,
        )
        lse = torch.logaddexp(lse, sums.logsumexp(-1))
    return lse.clamp_(min=-1e30).view(B, H, C, G)


def _write_relevance(
    found: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    start: int,
    mask: _Mask,
    lse: torch.Tensor | None,
    part: slice,
    scale: float,
    softcap: float | None,
) -> None:
    """Fill ``found [B, H, c, P]``, a view with its last dimension contiguous."""
    B, H, C, P = found.shape
    some = queries[:, :, part]
    block_d, block, dtype = _tiles(queries, keys)
    row_blocks, key_blocks = triton.cdiv(C, block), triton.cdiv(P, block)
    _relevance_kernel[(B * H * row_blocks * key_blocks,)](
        some,
        keys,
        # A pointer that the kernel ignores where there is one query for each head.
        found if lse is None else lse[:, :, part],
        found,
        *mask.arguments(part),
        *some.stride()[:4],
        *keys.stride()[:3],
        0 if lse is None else lse.stride(1),
        *found.stride()[1:3],
        H,
        C,
        row_blocks,
        key_blocks,
        start,
        P,
        scale if softcap is None else scale / softcap,
        1.0 if softcap is None else softcap,
        G=queries.shape[3],
        D=queries.shape[4],
        BLOCK_D=block_d,
        BLOCK_M=block,
        BLOCK_N=block,
        SOFTCAP=softcap is not None,
        CAUSAL=mask.positions is not None,
        HAS_LSE=lse is not None,
        DOT_DTYPE=dtype,
        num_warps=4,
        num_stages=2,
    )


@triton.jit
def _counted(
    valid_ptr,
    valid_stride_n,
    limits,
    slots,
    inside,
    CAUSAL: tl.constexpr,
):
    """``[M, N]`` or ``[1, N]``: which keys count for which rows; ``limits [M]`` with CAUSAL."""
    counted = inside & (tl.load(valid_ptr + slots * valid_stride_n, mask=inside, other=0) != 0)
    counted = counted[None, :]
    if CAUSAL:
        counted = counted & (slots[None, :] <= limits[:, None])
    return counted


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
    reading = here < rows
    columns = tl.arange(0, BLOCK_D)
    row = query_ptr + b * query_stride_b + h * query_stride_h
    row += (here // G)[:, None] * query_stride_c + (here % G)[:, None] * query_stride_g
    query = load_rows(row + columns[None, :], reading, columns, D, BLOCK_D, True)
    limits = here
    if CAUSAL:
        limits_ptr += b * limits_stride_b
        limits = tl.load(limits_ptr + here // G * limits_stride_c, mask=reading, other=-1)
    key_ptr += b * key_stride_b + h * key_stride_h
    valid_ptr += b * valid_stride_b

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    first = tl.program_id(1) * split_len
    last = tl.minimum(first + split_len, piece)
    for begin in range(first, last, BLOCK_N):
        places = (begin + tl.arange(0, BLOCK_N)).to(tl.int64)
        inside = places < last
        row = key_ptr + places[:, None] * key_stride_n
        key = load_rows(row + columns[None, :], inside, columns, D, BLOCK_D, True)
        dots = tl.dot(query.to(DOT_DTYPE), tl.trans(key).to(DOT_DTYPE), input_precision="ieee")
        counted = _counted(valid_ptr, valid_stride_n, limits, start + places, inside, CAUSAL)
        scores = base2_scores(dots, inner, outer, SOFTCAP)
        scores = tl.where(counted, scores, float("-inf"))
        _, _, peak, total = softmax_step(scores, peak, total)
    seen = total > 0.0
    lse = tl.where(seen, (peak + tl.log2(tl.where(seen, total, 1.0))) * LN_2, float("-inf"))
    target = (index * rows + here) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + target, lse, mask=reading)


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
    reading = here < centroids
    places = (tl.program_id(0) % key_blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = places < piece
    columns = tl.arange(0, BLOCK_D)

    key_ptr += b * key_stride_b + h * key_stride_h
    row = key_ptr + places[:, None] * key_stride_n
    key = load_rows(row + columns[None, :], inside, columns, D, BLOCK_D, True)
    limits = here
    if CAUSAL:
        limits_ptr += b * limits_stride_b
        limits = tl.load(limits_ptr + here * limits_stride_c, mask=reading, other=-1)
    valid_ptr += b * valid_stride_b
    counted = _counted(valid_ptr, valid_stride_n, limits, start + places, inside, CAUSAL)
    query_ptr += b * query_stride_b + h * query_stride_h
    lse_ptr += index * lse_stride_h
    best = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)
    for g in range(G):
        row = query_ptr + here[:, None] * query_stride_c + g * query_stride_g
        query = load_rows(row + columns[None, :], reading, columns, D, BLOCK_D, True)
        dots = tl.dot(query.to(DOT_DTYPE), tl.trans(key).to(DOT_DTYPE), input_precision="ieee")
        # Factors without log2(e): natural scores, as the denominators are.
        shares = base2_scores(dots, inner, outer, SOFTCAP)
        if HAS_LSE:
            shares -= tl.load(lse_ptr + here * G + g, mask=reading, other=0.0)[:, None]
        best = tl.maximum(best, shares)
    best = tl.where(counted, best, float("-inf"))
    found_ptr += index * found_stride_h
    tl.store(
        found_ptr + here[:, None] * found_stride_c + places[None, :],
        best,
        mask=reading[:, None] & inside[None, :],
    )
