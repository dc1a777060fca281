"""Centroids in Triton: their lists of keys, and what a recall does.

**Lists**: scores, shares of the softmax and group maximum in one kernel. A first reading of the
keys leaves the log-sum-exp of each query, a running softmax's denominator alone; where a head has
one query alone it is not needed. In a second one each chunk of keys meets some centroids: the
largest of a group's log-shares is written beside the best found so far, and the best of both stay.

**Recall**: cosines with all centroids, which are read once for up to 32 queries; their lists; each
token once. Repeats are found without sorting: in a table of all tokens the earliest place that
names a token stays, whatever the order in which programs come.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import (
    LOG2_E,
    capped_scores,
    dot_dtype,
    products,
    score_factors,
    softmax_lse,
    softmax_step,
    split_plan,
)
from hf_kvret_kernels.centroid.naive import MOST_MARKS, KeyChunks, Scoring
from hf_kvret_kernels.top_k.triton import top_k

# fp32 scores held at once: 64 MiB.
_MOST_SCORES = 1 << 24
# Centroids, queries or keys of a tile.
_ROWS = 64


def top_keys(
    queries: torch.Tensor, chunks: KeyChunks, count: int, scoring: Scoring
) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.top_keys``. Of equal keys the first are taken."""
    B, H, C, G, _ = queries.shape
    values = torch.full((B, H, C, count), float("-inf"), dtype=torch.float32, device=queries.device)
    ids = torch.full((B, H, C, count), -1, dtype=torch.int32, device=queries.device)
    if ids.numel() == 0:
        return ids
    if queries.stride(4) != 1:
        queries = queries.contiguous()
    lse = None if G == 1 else denominators(queries, chunks, scoring)
    for start, keys in whole_chunks(chunks):
        width = count + keys.shape[2]
        step = max(1, _MOST_SCORES // (B * H * width))
        for first in range(0, C, step):
            part = slice(first, first + step)
            scores = values.new_empty(*values[:, :, part].shape[:3], width)
            scores[..., :count] = values[:, :, part]
            _write_relevance(scores[..., count:], queries, keys, start, lse, part, scoring)
            # Ascending positions: what was found before comes first, and tokens stay in order.
            best = top_k(scores, count)
            absent, indices = best < 0, best.clamp(min=0).long()
            values[:, :, part] = scores.gather(-1, indices).masked_fill_(absent, float("-inf"))
            older = ids[:, :, part].gather(-1, indices.clamp(max=count - 1))
            result = torch.where(best < count, older, best + (start - count))
            ids[:, :, part] = result.masked_fill_(absent, -1)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def _write_relevance(
    result: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    start: int,
    lse: torch.Tensor | None,
    part: slice,
    scoring: Scoring,
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
        scoring.valid.view(torch.uint8),
        *scoring.valid.stride(),
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
        *score_factors(scoring.scale, scoring.softcap),
        G=queries.shape[3],
        BLOCK_M=_ROWS,
        BLOCK_N=_ROWS,
        SOFTCAP=scoring.softcap is not None,
        HAS_LSE=lse is not None,
        **product_shape(queries, keys),
    )


@triton.jit(do_not_specialize=["centroids", "row_blocks", "key_blocks", "start", "chunk"])
def _relevance_kernel(
    query_ptr, key_ptr, lse_ptr, found_ptr, valid_ptr,
    valid_stride_b, valid_stride_n, query_stride_b, query_stride_h, query_stride_c, query_stride_g,
    key_stride_b, key_stride_h, key_stride_n, lse_stride_h, found_stride_h, found_stride_c,
    heads, centroids, row_blocks, key_blocks, start, chunk, inner, outer,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, HAS_LSE: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """The largest ``score - lse`` of G queries, for a block of centroids and one of keys."""
    pair = tl.program_id(0) // key_blocks
    index = (pair // row_blocks).to(tl.int64)
    b, h = index // heads, index % heads
    here = (pair % row_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = here < centroids
    indices = (tl.program_id(0) % key_blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = indices < chunk
    key_rows = key_ptr + b * key_stride_b + h * key_stride_h + indices * key_stride_n
    valid_ptr += b * valid_stride_b
    score_mask = counted_keys(valid_ptr, valid_stride_n, start + indices, inside)
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
        found_ptr + here[:, None] * found_stride_c + indices[None, :],
        best,
        mask=row_mask[:, None] & inside[None, :],
    )


# Programs per multiprocessor to aim at, and the most parts that a chunk is cut into for it.
_WAVES = 4
_MOST_SPLITS = 64


def denominators(queries: torch.Tensor, chunks: KeyChunks, scoring: Scoring) -> torch.Tensor:
    """``[B, H, C, G]`` fp32 log-sum-exp over all keys; at least -1e30."""
    B, H, C, G, _ = queries.shape
    lse = torch.full((B, H, C * G), float("-inf"), dtype=torch.float32, device=queries.device)
    for start, keys in whole_chunks(chunks):
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
            scoring.valid.view(torch.uint8),
            *scoring.valid.stride(),
            *queries.stride()[:4],
            *keys.stride()[:3],
            H,
            C * G,
            tiles,
            start,
            P,
            split_len,
            *score_factors(scoring.scale, scoring.softcap, LOG2_E),
            G=G,
            BLOCK_M=_ROWS,
            BLOCK_N=_ROWS,
            SOFTCAP=scoring.softcap is not None,
            **product_shape(queries, keys),
        )
        lse = torch.logaddexp(lse, sums.logsumexp(-1))
    return lse.clamp_(min=-1e30).view(B, H, C, G)


@triton.jit(do_not_specialize=["rows", "tiles", "start", "chunk", "split_len"])
def _denominators_kernel(
    query_ptr, key_ptr, sums_ptr, valid_ptr,
    valid_stride_b, valid_stride_n, query_stride_b, query_stride_h, query_stride_c, query_stride_g,
    key_stride_b, key_stride_h, key_stride_n,
    heads, rows, tiles, start, chunk, split_len, inner, outer,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of a tile of queries, rows ``c * G + g``, over a part of a chunk of keys."""
    index = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = index // heads, index % heads
    here = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = here < rows
    query_rows = query_ptr + b * query_stride_b + h * query_stride_h
    query_rows += (here // G) * query_stride_c + (here % G) * query_stride_g
    key_ptr += b * key_stride_b + h * key_stride_h
    valid_ptr += b * valid_stride_b

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    first = tl.program_id(1) * split_len
    last = tl.minimum(first + split_len, chunk)
    for begin in range(first, last, BLOCK_N):
        tokens = (begin + tl.arange(0, BLOCK_N)).to(tl.int64)
        inside = tokens < last
        key_rows = key_ptr + tokens * key_stride_n
        dots = products(
            query_rows, row_mask, key_rows, inside, D, BLOCK_D, BLOCK_M, BLOCK_N, DOT_DTYPE
        )
        score_mask = counted_keys(valid_ptr, valid_stride_n, start + tokens, inside)
        scores = capped_scores(dots, inner, outer, SOFTCAP)
        scores = tl.where(score_mask, scores, float("-inf"))
        _, _, peak, total = softmax_step(scores, peak, total)
    target = (index * rows + here) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + target, softmax_lse(peak, total), mask=row_mask)


# Centroids that a program reads, and the most queries that meet them at once.
_CENTROIDS = 64
_MOST_QUERIES = 32
# Ids of a program that unpacks or unites.
_IDS = 1024


def similarity(
    query: torch.Tensor, centroids: torch.Tensor, inverse_lengths: torch.Tensor, largest: bool
) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.similarity``."""
    B, H, Q, G, _ = query.shape
    C = centroids.shape[2]
    cosines = torch.empty(B, H, Q, C, dtype=torch.float32, device=query.device)
    if cosines.numel() == 0:
        return cosines
    # Products of fp32 with half numbers take twice the registers.
    query = query.to(centroids.dtype).contiguous()
    if centroids.stride(4) != 1:
        centroids = centroids.contiguous()
    blocks = triton.cdiv(C, _CENTROIDS)
    _similarity_kernel[(B * H * blocks,)](
        query,
        centroids,
        inverse_lengths,
        cosines,
        *centroids.stride()[:4],
        *inverse_lengths.stride(),
        H,
        Q,
        C,
        blocks,
        LARGEST=largest,
        G=G,
        BLOCK_Q=max(16, min(_MOST_QUERIES, triton.next_power_of_2(Q))),
        BLOCK_C=_CENTROIDS,
        **product_shape(query, centroids),
    )
    return cosines


def take_lists(low: torch.Tensor, high: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.take_lists``."""
    rho = low.shape[3]
    ids = torch.empty(*index.shape, rho, dtype=torch.int32, device=low.device)
    if ids.numel() == 0:
        return ids
    blocks = triton.cdiv(rho, _IDS)
    _take_kernel[(index.numel() * blocks,)](
        low,
        low if high is None else high,
        index.contiguous(),
        ids,
        *low.stride(),
        *(low if high is None else high).stride(),
        index.shape[1],
        index.shape[2] * index.shape[3],
        low.shape[2],
        rho,
        blocks,
        HAS_HIGH=high is not None,
        BLOCK=_IDS,
        enable_fp_fusion=True,
    )
    return ids


def unite(ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.unite``."""
    B, H, Q, M = ids.shape
    n = valid.shape[1]
    result = torch.empty(ids.shape, dtype=ids.dtype, device=ids.device)
    if result.numel() == 0:
        return result
    ids, rows, blocks = ids.contiguous(), B * H * Q, triton.cdiv(M, _IDS)
    step = min(rows, max(1, MOST_MARKS // n))
    marks = torch.empty(step, n, dtype=torch.int32, device=ids.device)
    for first in range(0, rows, step):
        marks.fill_(M)
        grid = (min(step, rows - first) * blocks,)
        layout = (*valid.stride(), first, H * Q, M, n, blocks)
        _mark_kernel[grid](
            ids, valid.view(torch.uint8), marks, *layout, BLOCK=_IDS, enable_fp_fusion=True
        )
        _keep_kernel[grid](
            ids, marks, result, first, M, n, blocks, BLOCK=_IDS, enable_fp_fusion=True
        )
    return result


@triton.jit(do_not_specialize=["queries", "length", "blocks"])
def _similarity_kernel(
    query_ptr, centroids_ptr, inverse_ptr, cosines_ptr,
    stride_b, stride_h, stride_c, stride_g, inverse_stride_b, inverse_stride_h, inverse_stride_c,
    inverse_stride_g,
    heads, queries, length, blocks,
    LARGEST: tl.constexpr, G: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """Mean or largest cosine of the group: a block of centroids of one head, and all queries."""
    index = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = index // heads, index % heads
    indices = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = indices < length
    centroids_ptr += b * stride_b + h * stride_h
    inverse_ptr += b * inverse_stride_b + h * inverse_stride_h
    for start in range(0, queries, BLOCK_Q):
        query_index = start + tl.arange(0, BLOCK_Q)
        query_mask = query_index < queries
        result = tl.full((BLOCK_Q, BLOCK_C), float("-inf") if LARGEST else 0.0, tl.float32)
        for g in range(G):
            row = (index * queries + query_index) * G + g
            dots = products(
                query_ptr + row * D,
                query_mask,
                centroids_ptr + indices * stride_c + g * stride_g,
                inside,
                D,
                BLOCK_D,
                BLOCK_Q,
                BLOCK_C,
                DOT_DTYPE,
            )
            inverse = tl.load(
                inverse_ptr + indices * inverse_stride_c + g * inverse_stride_g,
                mask=inside,
                other=0.0,
            )
            cosines = dots * inverse[None, :]
            result = tl.maximum(result, cosines) if LARGEST else result + cosines / G
        target = (index * queries + query_index)[:, None] * length + indices[None, :]
        tl.store(cosines_ptr + target, result, mask=query_mask[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["list_count", "lists", "blocks"])
def _take_kernel(
    low_ptr, high_ptr, index_ptr, ids_ptr,
    low_stride_b, low_stride_h, low_stride_m, low_stride_r, high_stride_b, high_stride_h,
    high_stride_m, high_stride_r,
    heads, list_count, lists, rho, blocks,
    HAS_HIGH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Unpack a chunk of one of ``lists`` lists; ``list_count`` are requested for each head."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    indices = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = indices < rho
    b, h = row // list_count // heads, row // list_count % heads
    centroid = tl.load(index_ptr + row)
    list_mask = indices < tl.where((centroid >= 0) & (centroid < lists), rho, 0)
    low_ptr += b * low_stride_b + h * low_stride_h + centroid * low_stride_m
    ids = tl.load(low_ptr + indices * low_stride_r, mask=list_mask, other=0).to(tl.int32) & 65535
    if HAS_HIGH:
        high_ptr += b * high_stride_b + h * high_stride_h + centroid * high_stride_m
        high = tl.load(high_ptr + indices * high_stride_r, mask=list_mask, other=0)
        ids = ids | (high.to(tl.int32) << 16)
    tl.store(ids_ptr + row * rho + indices, ids - 1, mask=inside)


@triton.jit(do_not_specialize=["first", "queries", "count", "length", "blocks"])
def _mark_kernel(
    ids_ptr, valid_ptr, marks_ptr,
    valid_stride_b, valid_stride_n,
    first, queries, count, length, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The earliest place of each valid token that is named; rows of marks start at ``first``."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    indices = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + (first + row) * count + indices, mask=indices < count, other=-1)
    id_mask = (ids >= 0) & (ids < length)
    tokens = ids.to(tl.int64)
    valid_ptr += ((first + row) // queries) * valid_stride_b
    id_mask = id_mask & (tl.load(valid_ptr + tokens * valid_stride_n, mask=id_mask, other=0) != 0)
    tl.atomic_min(marks_ptr + row * length + tokens, indices, mask=id_mask, sem="relaxed")


@triton.jit(do_not_specialize=["first", "count", "length", "blocks"])
def _keep_kernel(ids_ptr, marks_ptr, united_ptr, first, count, length, blocks, BLOCK: tl.constexpr):
    """The ids that stand where their token's mark says; a token that is not valid has none."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    indices = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = indices < count
    source = (first + row) * count + indices
    ids = tl.load(ids_ptr + source, mask=inside, other=-1)
    id_mask = (ids >= 0) & (ids < length)
    mark = tl.load(marks_ptr + row * length + ids.to(tl.int64), mask=id_mask, other=-1)
    tl.store(united_ptr + source, tl.where(mark == indices, ids, -1), mask=inside)


def whole_chunks(chunks: KeyChunks) -> Iterator[tuple[int, torch.Tensor]]:
    """Chunks that are not empty, their keys contiguous in the last dimension."""
    for start, keys in chunks():
        if keys.shape[2]:
            yield start, keys if keys.stride(3) == 1 else keys.contiguous()


@triton.jit
def counted_keys(valid_ptr, valid_stride_n, slots, inside):
    """``[1, N]``: which keys count."""
    valid = tl.load(valid_ptr + slots * valid_stride_n, mask=inside, other=0)
    return (inside & (valid != 0))[None, :]


# Numbers of a row that are multiplied at a time. fp32 takes many registers: more of it would spill.
_NARROW = 128
_WIDE = 32


def product_shape(left: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
    """``D``, ``BLOCK_D`` and ``DOT_DTYPE`` of ``products`` for rows of these, and the launch's.

    Where their dtypes differ both become fp32, so that nothing is rounded.
    """
    same = left.dtype == right.dtype
    width = left.shape[-1]
    most = _NARROW if same and left.element_size() == 2 else _WIDE
    return {
        "D": width,
        "BLOCK_D": max(16, min(most, triton.next_power_of_2(width))),
        "DOT_DTYPE": dot_dtype(left.dtype) if same else tl.float32,
        "num_warps": 4,
        "num_stages": 2,
        "enable_fp_fusion": True,
    }
