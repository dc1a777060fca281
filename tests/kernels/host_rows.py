"""Paged rows on the host, ids of some of them, and queries."""

from __future__ import annotations

import torch

from hf_kvret_kernels.paged import PagedRows


def paged(
    chunks: tuple[int, ...] = (9,),
    *,
    batch: int = 2,
    kv_heads: int = 2,
    page_len: int = 8,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
) -> PagedRows:
    """Random rows in chunks of ``chunks`` pages, which each batch row has in another order."""
    torch.manual_seed(sum(chunks) + sum(dims))
    pages = [torch.randn(count, kv_heads, page_len, sum(dims)).to(dtype) for count in chunks]
    table = torch.stack([torch.randperm(sum(chunks)) for _ in range(batch)])
    return PagedRows(pages, table.int(), dims[0])


def random_ids(
    rows: PagedRows, heads: int, queries: int, count: int, holes: float = 0.2
) -> torch.Tensor:
    """Distinct tokens ``[B, heads, queries, count]`` in random order, some of them -1."""
    batch, columns = rows.table.shape
    tokens = columns * rows.page_len
    order = torch.rand(batch, heads, queries, tokens).argsort(-1)[..., :count].int()
    order[torch.rand(order.shape) < holes] = -1
    return order


def random_query(rows: PagedRows, heads: int, queries: int = 1) -> torch.Tensor:
    return torch.randn(len(rows.table), heads, queries, rows.key_dim).to(rows.dtype)
