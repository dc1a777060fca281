"""Scores of all tokens from low-rank proxies of their keys.

A proxy is a vector of r numbers whose inner product with a query's proxy stands for that of key
and query (LRQK, section 4.3). Dimensions: B batch, Hq query heads, F sets of proxies (one for each
KV head, or for each query head), H selecting heads, Q queries at once, n tokens, D numbers of a
query, r rank.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from hf_kvret_kernels._dispatch import (
    FLOATS,
    check_no_grad,
    check_softcap,
    check_tensor,
    check_valid,
    run,
)

__all__ = ["MOST_RANK", "ROW_DTYPES", "KeptQueries", "Projection", "relevance", "top_indices"]

# A program of the Triton kernel holds whole rows of proxies.
MOST_RANK = 256
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)


class Projection(NamedTuple):
    """Maps of queries to their proxies.

    Attributes:
        maps: ``[B, F, D, r]`` fp32; a proxy is ``query @ maps``.
        steps: ``[B, F, 1, r]`` fp32 that proxies are multiplied with; None: 1.
        mean: ``[B, F, D]`` fp32, whose product with a query is added to all of its scores before
            they are scaled; None: 0. Only with a cap it makes a difference to the order.
    """

    maps: torch.Tensor
    steps: torch.Tensor | None = None
    mean: torch.Tensor | None = None

    def of(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Proxies ``[B, Hq, Q, r]`` of ``query [B, Hq, Q, D]``, and ``[B, Hq, Q]`` to be added.

        Both fp32; None for 0.
        """
        batch, query_heads, count, dim = query.shape
        sets = self.maps.shape[1]
        grouped = query.float().reshape(batch, sets, -1, dim)
        proxies = grouped @ self.maps
        if self.steps is not None:
            proxies = proxies * self.steps
        offset = None
        if self.mean is not None:
            offset = (grouped @ self.mean.unsqueeze(-1)).view(batch, query_heads, count)
        return proxies.view(batch, query_heads, count, -1), offset


class KeptQueries(NamedTuple):
    """Where a step's query is written for later.

    Attributes:
        rows: ``[B, Hq, room, D]`` of the query's dtype, contiguous.
        next: ``[2]`` int64: the place in ``room`` to write to, which is counted up, and a ticket,
            which is 0 before and afterwards.
    """

    rows: torch.Tensor
    next: torch.Tensor


class ProxyCall(NamedTuple):
    """Arguments of ``relevance`` and ``top_indices``."""

    query: torch.Tensor
    rows: torch.Tensor
    heads: int
    valid: torch.Tensor | None
    softcap: float | None
    scale: float = 1.0
    projection: Projection | None = None
    kept: KeptQueries | None = None

    def check(self) -> Self:
        """The same call; ValueError unless its arguments fit."""
        query, rows, heads, device = self.query, self.rows, self.heads, self.query.device
        check_no_grad(query=query)
        check_tensor("query", query, (None,) * 4, FLOATS)
        batch, query_heads, queries, dim = query.shape
        rank = dim
        if self.projection is not None:
            maps, steps, mean = self.projection
            check_tensor("maps", maps, (batch, None, dim, None), (torch.float32,), device)
            sets, rank = maps.shape[1], maps.shape[3]
            check_tensor("rows", rows, (batch, sets, None, rank), ROW_DTYPES, device)
            for name, each, shape in (("steps", steps, (1, rank)), ("mean", mean, (dim,))):
                if each is not None:
                    check_tensor(name, each, (batch, sets, *shape), (torch.float32,), device)
        if self.kept is not None:
            room = batch, query_heads, None, dim
            check_tensor("kept.rows", self.kept.rows, room, (query.dtype,), device)
            check_tensor("kept.next", self.kept.next, (2,), (torch.int64,), device)
            if queries != 1 or not self.kept.rows.is_contiguous():
                raise ValueError("kept: pass contiguous rows, and one query")
        check_tensor("rows", rows, (batch, None, None, rank), ROW_DTYPES, device)
        if not 1 <= rank <= MOST_RANK:
            raise ValueError(f"rank r is {rank}: pass proxies of 1 to {MOST_RANK} numbers")
        one_token, one_column = rows.shape[2] <= 1, rank == 1
        if (rows.stride(2) != rank and not one_token) or (rows.stride(3) != 1 and not one_column):
            raise ValueError(
                f"rows has strides {rows.stride()}: tokens must be contiguous, pass "
                "rows.contiguous()"
            )
        for name, count in (("rows' sets", rows.shape[1]), ("heads", heads)):
            if count < 1 or query_heads % count:
                raise ValueError(f"{name} are {count}: must divide the {query_heads} query heads")
        check_valid(self.valid, (batch, rows.shape[2]), device)
        check_softcap(self.softcap)
        return self


def relevance(
    query: torch.Tensor,
    rows: torch.Tensor,
    heads: int,
    *,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    projection: Projection | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, Q, n]`` fp32: how much each token matters to the queries of a selecting head.

    With one query head for each selecting head it is the score; else the largest of the
    log-softmaxes over tokens that the group's query heads give (raw scores of different heads are
    not comparable). -inf for tokens that are not valid. Sums are fp32.

    Args:
        query: ``[B, Hq, Q, r]`` fp32, fp16 or bf16, proxies of the queries, for int8 rows times
            each column's step; with ``projection`` the queries themselves, ``[B, Hq, Q, D]``.
        rows: ``[B, F, n, r]`` proxies of the keys, bf16, fp16, fp32 or int8; tokens contiguous
            (``stride(2) == r``, ``stride(3) == 1``). Query head h reads set ``h // (Hq // F)``.
        heads: H, a divisor of Hq.
        valid: ``[B, n]`` bool, any strides, or None for all valid.
        softcap: ``c`` of ``c * tanh(score / c)``, or None.
        scale: factor of the products, before the cap.
        projection: makes proxies of queries; None where they are given.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    call = ProxyCall(query, rows, heads, valid, softcap, scale, projection).check()
    return run(__name__, "relevance", backend, call, on=query)


def top_indices(
    query: torch.Tensor,
    rows: torch.Tensor,
    heads: int,
    count: int,
    *,
    valid: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    projection: Projection | None = None,
    kept: KeptQueries | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, Q, count]`` int32: indices of the tokens of the highest ``relevance``.

    They ascend; of equal ones the first are taken. Tokens that are not valid are never taken: -1
    stands for those that are missing, behind the others.

    Args:
        query, rows, heads, valid, softcap, scale, projection: as of ``relevance``.
        count: 1 to n.
        kept: where the query, one for each sequence, is written; None: nowhere.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: as ``relevance``, and a count out of range.
    """
    call = ProxyCall(query, rows, heads, valid, softcap, scale, projection, kept).check()
    if not 1 <= count <= rows.shape[2]:
        raise ValueError(f"count={count}: 1 to {rows.shape[2]} of {rows.shape[2]} tokens")
    return run(__name__, "top_indices", backend, call, count, on=query)
