"""Paged rows of random numbers, ids of some of them, queries, and attention in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvret_kernels.paged import PagedRows

# What stands in table entries that no id leads to; as a page number it would crash.
NO_PAGE = 10**9
NEVER = float("-inf")
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
TWO_ROWS = [[0, 1, 2, 3], [7, 5, 8, 4]]


def paged(
    device: str = "cpu",
    table: Sequence[Sequence[int]] | None = None,
    chunks: tuple[int, ...] = (9,),
    *,
    batch: int = 2,
    kv_heads: int = 2,
    page_len: int = 8,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
) -> PagedRows:
    """Random rows in chunks of ``chunks`` pages; without a table each batch row shuffles all."""
    torch.manual_seed(sum(chunks) + sum(dims))
    shape = (kv_heads, page_len, sum(dims))
    pages = [torch.randn(count, *shape).to(device, dtype) for count in chunks]
    if table is None:
        table = [torch.randperm(sum(chunks)).tolist() for _ in range(batch)]
    return PagedRows(pages, torch.tensor(table, dtype=torch.int32, device=device), dims[0])


def random_ids(
    rows: PagedRows, heads: int, queries: int, count: int, holes: float = 0.2
) -> torch.Tensor:
    """Distinct tokens ``[B, heads, queries, count]`` in random order, some of them -1."""
    batch, columns = rows.table.shape
    tokens = columns * rows.page_len
    order = torch.rand(batch, heads, queries, tokens).argsort(-1)[..., :count].int()
    order[torch.rand(order.shape) < holes] = -1
    return order.contiguous().to(rows.table.device)


def random_query(rows: PagedRows, heads: int, queries: int = 1) -> torch.Tensor:
    query = torch.randn(len(rows.table), heads, queries, rows.key_dim)
    return query.to(rows.table.device, rows.dtype)


def lookup(rows: PagedRows, b: int, kv_head: int, token: int) -> torch.Tensor:
    """One row, found the slow way: chunk by chunk."""
    page = int(rows.table[b, token // rows.page_len])
    for chunk in rows.chunks:
        if page < len(chunk):
            return chunk[page, kv_head, token % rows.page_len]
        page -= len(chunk)
    raise AssertionError("page beyond the chunks")


def reference(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> Results:
    """``(out, lse, scores)`` in float64, query by query."""
    batch, heads, queries, _ = query.shape
    lead = (batch, heads, queries)
    out = torch.zeros(*lead, rows.value_dim, dtype=torch.float64)
    lse = torch.full(lead, NEVER, dtype=torch.float64)
    scores = torch.full((*lead, ids.shape[3]), NEVER, dtype=torch.float64)
    for place in torch.cartesian_prod(*map(torch.arange, lead)).tolist():
        b, h, i = place
        chosen = ids[b, h * ids.shape[1] // heads, i].cpu()
        indices = (chosen >= 0).nonzero()[:, 0]
        if not len(indices):
            continue
        kv_head = h * rows.heads // heads
        result = torch.stack([lookup(rows, b, kv_head, t) for t in chosen[indices].tolist()])
        result = result.cpu().double()
        own = result[:, : rows.key_dim] @ query[b, h, i].cpu().double() * scale
        if softcap is not None:
            own = softcap * (own / softcap).tanh()
        scores[tuple(place)][indices] = own
        lse[tuple(place)] = own.logsumexp(0)
        weights = (own - own.logsumexp(0).nan_to_num(neginf=0.0)).exp()
        out[tuple(place)] = weights @ result[:, rows.key_dim :]
    return out, lse, scores
