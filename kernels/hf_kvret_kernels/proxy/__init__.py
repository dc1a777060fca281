"""Scores of all tokens from low-rank proxies of their keys.

A proxy is a vector of r numbers whose inner product with a query's proxy stands for that of key
and query (LRQK, section 4.3). Dimensions: B batch, Hq query heads, F sets of proxies (one for each
KV head, or for each query head), H selecting heads, Q queries at once, n tokens, r rank.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from hf_kvret_kernels._dispatch import check_no_grad, check_softcap, check_tensor, check_valid, run

__all__ = ["MOST_RANK", "ROW_DTYPES", "relevance", "top_indices"]

# A program of the Triton kernel holds whole rows of proxies.
MOST_RANK = 256
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)


class ProxyCall(NamedTuple):
    """Arguments of ``relevance``."""

    query: torch.Tensor
    rows: torch.Tensor
    heads: int
    valid: torch.Tensor | None
    offset: torch.Tensor | None
    softcap: float | None

    def check(self) -> Self:
        """The same call; ValueError unless its arguments fit."""
        query, rows, heads, valid, offset, softcap = self
        check_no_grad(query=query)
        check_tensor("query", query, (None,) * 4, (torch.float32,))
        batch, query_heads, _, rank = query.shape
        check_tensor("rows", rows, (batch, None, None, rank), ROW_DTYPES, query.device)
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
        check_valid(valid, (batch, rows.shape[2]), query.device)
        if offset is not None:
            check_tensor("offset", offset, query.shape[:3], (torch.float32,), query.device)
            if not offset.is_contiguous():
                raise ValueError(f"offset has strides {offset.stride()}: pass offset.contiguous()")
        check_softcap(softcap)
        return self


def relevance(
    query: torch.Tensor,
    rows: torch.Tensor,
    heads: int,
    *,
    valid: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, Q, n]`` fp32: how much each token matters to the queries of a selecting head.

    With one query head for each selecting head it is the score; else the largest of the
    log-softmaxes over tokens that the group's query heads give (raw scores of different heads are
    not comparable). -inf for tokens that are not valid. Sums are fp32.

    Args:
        query: ``[B, Hq, Q, r]`` fp32 proxies of the queries, times the attention scale and, for
            int8 rows, times each column's step.
        rows: ``[B, F, n, r]`` proxies of the keys, bf16, fp16, fp32 or int8; tokens contiguous
            (``stride(2) == r``, ``stride(3) == 1``). Query head h reads set ``h // (Hq // F)``.
        heads: H, a divisor of Hq.
        valid: ``[B, n]`` bool, any strides, or None for all valid.
        offset: ``[B, Hq, Q]`` fp32, contiguous, added to all scores of a query before the cap; None
            for 0. Only with a cap it makes a difference to the order.
        softcap: ``c`` of ``c * tanh(score / c)``, or None.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    call = ProxyCall(query, rows, heads, valid, offset, softcap).check()
    return run(__name__, "relevance", backend, call, on=query)


def top_indices(
    query: torch.Tensor,
    rows: torch.Tensor,
    heads: int,
    count: int,
    *,
    valid: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, H, Q, count]`` int32: indices of the tokens of the highest ``relevance``.

    They ascend; of equal ones the first are taken. Tokens that are not valid are never taken: -1
    stands for those that are missing, behind the others.

    Args:
        query, rows, heads, valid, offset, softcap: as of ``relevance``.
        count: 1 to n.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: as ``relevance``, and a count out of range.
    """
    call = ProxyCall(query, rows, heads, valid, offset, softcap).check()
    if not 1 <= count <= rows.shape[2]:
        raise ValueError(f"count={count}: 1 to {rows.shape[2]} of {rows.shape[2]} tokens")
    return run(__name__, "top_indices", backend, call, count, on=query)
