"""Triton kernels of a recall: cosines with all centroids, their lists, each token once.

Centroids are read once for up to 32 queries. Repeats are found without sorting: in a table of all
tokens the earliest place that names a token stays, whatever the order in which programs come.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels.centroid.naive import MOST_MARKS
from hf_kvret_kernels.centroid.triton_products import product_shape, products

# Centroids that a program reads, and the most queries that meet them at once.
_CENTROIDS = 64
_MOST_QUERIES = 32
# Ids of a program that unpacks or unites.
_IDS = 1024


def similarity(
    query: torch.Tensor, centroids: torch.Tensor, inverse_norms: torch.Tensor
) -> torch.Tensor:
    """See ``hf_kvret_kernels.centroid.similarity``."""
    B, H, Q, G, _ = query.shape
    C = centroids.shape[2]
    cosines = torch.empty(B, H, Q, C, dtype=torch.float32, device=query.device)
    if cosines.numel() == 0:
        return cosines
    query = query.contiguous()
    if centroids.stride(4) != 1:
        centroids = centroids.contiguous()
    query_norms = torch.linalg.vector_norm(query, dim=-1, dtype=torch.float32)
    blocks = triton.cdiv(C, _CENTROIDS)
    _similarity_kernel[(B * H * blocks,)](
        query,
        centroids,
        query_norms,
        inverse_norms,
        cosines,
        *centroids.stride()[:4],
        *inverse_norms.stride(),
        H,
        Q,
        C,
        blocks,
        G=G,
        BLOCK_Q=max(16, min(_MOST_QUERIES, triton.next_power_of_2(Q))),
        BLOCK_C=_CENTROIDS,
        **product_shape(query, centroids),
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
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
            ids,
            valid.view(torch.uint8),
            marks,
            *layout,
            BLOCK=_IDS,
            enable_fp_fusion=True,
        )
        _keep_kernel[grid](
            ids,
            marks,
            result,
            first,
            M,
            n,
            blocks,
            BLOCK=_IDS,
            enable_fp_fusion=True,
        )
    return result


@triton.jit(do_not_specialize=["queries", "length", "blocks"])
def _similarity_kernel(
    query_ptr,
    centroids_ptr,
    norms_ptr,
    inverse_ptr,
    cosines_ptr,
    stride_b,
    stride_h,
    stride_c,
    stride_g,
    inverse_stride_b,
    inverse_stride_h,
    inverse_stride_c,
    inverse_stride_g,
    heads,
    queries,
    length,
    blocks,
    G: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """The largest cosine of the group, for a block of centroids of one head and all queries."""
    index = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = index // heads, index % heads
    places = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = places < length
    centroids_ptr += b * stride_b + h * stride_h
    inverse_ptr += b * inverse_stride_b + h * inverse_stride_h
    for start in range(0, queries, BLOCK_Q):
        query_index = start + tl.arange(0, BLOCK_Q)
        query_mask = query_index < queries
        best = tl.full((BLOCK_Q, BLOCK_C), float("-inf"), tl.float32)
        for g in range(G):
            row = (index * queries + query_index) * G + g
            dots = products(
                query_ptr + row * D,
                query_mask,
                centroids_ptr + places * stride_c + g * stride_g,
                inside,
                D,
                BLOCK_D,
                BLOCK_Q,
                BLOCK_C,
                DOT_DTYPE,
            )
            norms = tl.maximum(tl.load(norms_ptr + row, mask=query_mask, other=1.0), 1e-12)
            inverse = tl.load(
                inverse_ptr + places * inverse_stride_c + g * inverse_stride_g,
                mask=inside,
                other=0.0,
            )
            best = tl.maximum(best, dots / norms[:, None] * inverse[None, :])
        target = (index * queries + query_index)[:, None] * length + places[None, :]
        tl.store(cosines_ptr + target, best, mask=query_mask[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["list_count", "lists", "blocks"])
def _take_kernel(
    low_ptr,
    high_ptr,
    index_ptr,
    ids_ptr,
    low_stride_b,
    low_stride_h,
    low_stride_m,
    low_stride_r,
    high_stride_b,
    high_stride_h,
    high_stride_m,
    high_stride_r,
    heads,
    list_count,
    lists,
    rho,
    blocks,
    HAS_HIGH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Unpack a piece of one of ``lists`` lists; ``list_count`` are requested for each head."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    places = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = places < rho
    b, h = row // list_count // heads, row // list_count % heads
    centroid = tl.load(index_ptr + row)
    held = places < tl.where((centroid >= 0) & (centroid < lists), rho, 0)
    low_ptr += b * low_stride_b + h * low_stride_h + centroid * low_stride_m
    ids = tl.load(low_ptr + places * low_stride_r, mask=held, other=0).to(tl.int32) & 65535
    if HAS_HIGH:
        high_ptr += b * high_stride_b + h * high_stride_h + centroid * high_stride_m
        high = tl.load(high_ptr + places * high_stride_r, mask=held, other=0)
        ids = ids | (high.to(tl.int32) << 16)
    tl.store(ids_ptr + row * rho + places, ids - 1, mask=inside)


@triton.jit(do_not_specialize=["first", "queries", "count", "length", "blocks"])
def _mark_kernel(
    ids_ptr,
    valid_ptr,
    marks_ptr,
    valid_stride_b,
    valid_stride_n,
    first,
    queries,
    count,
    length,
    blocks,
    BLOCK: tl.constexpr,
):
    """The earliest place of each valid token that is named; rows of marks start at ``first``."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    places = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + (first + row) * count + places, mask=places < count, other=-1)
    id_mask = (ids >= 0) & (ids < length)
    tokens = ids.to(tl.int64)
    valid_ptr += ((first + row) // queries) * valid_stride_b
    id_mask = id_mask & (tl.load(valid_ptr + tokens * valid_stride_n, mask=id_mask, other=0) != 0)
    tl.atomic_min(marks_ptr + row * length + tokens, places, mask=id_mask, sem="relaxed")


@triton.jit(do_not_specialize=["first", "count", "length", "blocks"])
def _keep_kernel(
    ids_ptr,
    marks_ptr,
    united_ptr,
    first,
    count,
    length,
    blocks,
    BLOCK: tl.constexpr,
):
    """The ids that stand where their token's mark says; a token that is not valid has none."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    places = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    source = (first + row) * count + places
    ids = tl.load(ids_ptr + source, mask=inside, other=-1)
    id_mask = (ids >= 0) & (ids < length)
    mark = tl.load(marks_ptr + row * length + ids.to(tl.int64), mask=id_mask, other=-1)
    tl.store(united_ptr + source, tl.where(mark == places, ids, -1), mask=inside)
