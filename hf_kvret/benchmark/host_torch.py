"""The opponents in torch: rows of host memory gathered, then attended to by sdpa."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from hf_kvret_kernels.paged import PagedRows

_PAGE_BITS = 6
PAGE_LEN = 1 << _PAGE_BITS


@dataclass(frozen=True)
class HostShape:
    """Sizes that all cells share: tokens of a sequence, KV heads, query heads of each, head dim."""

    tokens: int
    heads: int
    group: int
    dim: int

    @property
    def scale(self) -> float:
        """Factor of the dot products."""
        return self.dim**-0.5

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Of a key with its value."""
        return 2 * self.dim * dtype.itemsize

    def pages(self) -> int:
        """Of one sequence."""
        return -(-self.tokens // PAGE_LEN)

    def sequence_bytes(self, dtype: torch.dtype) -> int:
        """Of one sequence's rows, in whole pages."""
        return self.pages() * PAGE_LEN * self.heads * self.row_bytes(dtype)


def _sdpa(
    shape: HostShape,
    gathered: torch.Tensor,
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
) -> torch.Tensor:
    matrix = rows.chunks[0].view(-1, rows.width)
    torch.index_select(
        matrix, 0, _row_numbers(rows, ids).flatten(), out=gathered.view(-1, rows.width)
    )
    keys, values = gathered[..., : shape.dim], gathered[..., shape.dim :]
    return _attend(shape, query, keys, values).reshape(query.shape)


def _sdpa_apart(
    shape: HostShape,
    gathered: torch.Tensor,
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
) -> torch.Tensor:
    matrix = rows.chunks[0].view(-1, shape.dim)
    index = _row_numbers(rows, ids).flatten().mul_(2)
    keys, values = gathered.view(2, -1, shape.dim)
    torch.index_select(matrix, 0, index, out=keys)
    torch.index_select(matrix, 0, index.add_(1), out=values)
    halves = (half.view(*gathered.shape[:2], shape.dim) for half in (keys, values))
    return _attend(shape, query, *halves).reshape(query.shape)


def _sdpa_by_head(
    shape: HostShape,
    gathered: torch.Tensor,
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
) -> torch.Tensor:
    matrix = rows.chunks[0].view(-1, rows.width)
    gathered = gathered[0]
    grouped = query.view(-1, shape.group, shape.dim)
    out = torch.empty_like(grouped)
    for number, index in enumerate(_row_numbers(rows, ids)):
        torch.index_select(matrix, 0, index, out=gathered)
        keys, values = gathered[..., : shape.dim], gathered[..., shape.dim :]
        out[number] = _attend(shape, grouped[number], keys, values)
    return out.view(query.shape)


def _attend(
    shape: HostShape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """``[1, N, G, D]`` of keys and values ``[N, K, D]``, or ``[K, D]`` with N = 1.

    The query heads of a group stand where sdpa has the queries of one head: without a mask that is
    the same attention, and no key is copied for them.
    """
    count = keys.shape[-2]
    grouped = query.view(1, -1, shape.group, shape.dim)
    keys, values = (part.view(1, -1, count, shape.dim) for part in (keys, values))
    return functional.scaled_dot_product_attention(grouped, keys, values, scale=shape.scale)


def _row_numbers(rows: PagedRows, ids: torch.Tensor) -> torch.Tensor:
    """``[B * H, K]`` int64: where the rows of ``ids`` stand in the chunk, seen as a matrix."""
    batch, heads, _, count = ids.shape
    tokens = ids.view(batch, heads * count)
    pages = rows.table.gather(1, (tokens >> _PAGE_BITS).long()).long()
    starts = torch.arange(heads).mul_(PAGE_LEN).repeat_interleave(count)
    index = pages.mul_(heads * PAGE_LEN).add_(tokens & (PAGE_LEN - 1)).add_(starts)
    return index.view(batch * heads, count)


TORCH_WAYS = {"sdpa": _sdpa, "sdpa-apart": _sdpa_apart, "sdpa-by-head": _sdpa_by_head}
"""The ways in torch that compute in the rows' dtype; the quickest is the opponent. They gather the
rows of all heads, or keys and values apart, and attend once; or go head by head, so that gathered
rows are still in the processor's caches when they are used. Tried and left out, for they were at
most as quick: softmax between two matrix products, ``enable_gqa``, expanded heads."""
