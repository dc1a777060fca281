"""Exact attention over chosen rows of a paged key/value store."""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import check_attention_inputs, choose_backend, launching_on
from hf_kvret_kernels.gather_attention import naive
from hf_kvret_kernels.paged import PagedRows

__all__ = ["gather_attention"]


def gather_attention(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over exactly the rows that its ids name.

    Args:
        query: ``[B, Hq, Q, Dk]`` of the rows' dtype, contiguous in the last dimension.
        rows: the paged keys and values; its table lies on the query's device, its chunks there
            too or in pinned host memory (Triton only).
        ids: ``[B, H, Q, K]`` int32 token numbers, -1 for none, distinct otherwise. With H = Hkv one
            selection serves the ``Hq / Hkv`` query heads of a group and each row is read once;
            with H = Hq every query head has its own. K may be 0.
        scale: factor of the dot products.
        softcap: ``c`` of ``c * tanh(scale * q.k / c)``, or None.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Returns:
        ``out [B, Hq, Q, Dv]`` fp32 and ``lse [B, Hq, Q]`` fp32 (natural log) on the query's device.
        A query without rows has out 0 and lse -inf. Softmax and sums are fp32; the Triton kernel
        rounds softmax weights to the rows' dtype before they meet the values.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, an unknown backend, gradients.
        ImportError: ``"triton"`` without Triton.

    Token numbers are not checked against the table: that would have to look at the data.
    """
    check_attention_inputs(query=query)
    rows.check_ids(ids)
    batch, heads, queries, width = query.shape
    if query.dtype != rows.dtype or query.device != rows.table.device or width != rows.key_dim:
        raise ValueError(
            f"query is {query.dtype} on {query.device} with Dk={width}, the rows are {rows.dtype} "
            f"with a page table on {rows.table.device} and Dk={rows.key_dim}: they must agree"
        )
    if ids.shape[0] != batch or ids.shape[2] != queries or ids.shape[1] not in (rows.heads, heads):
        raise ValueError(
            f"ids has shape {tuple(ids.shape)}: pass [{batch}, {rows.heads} or {heads}, {queries}, "
            f"K] for a query of shape {tuple(query.shape)}"
        )
    if heads % rows.heads:
        raise ValueError(f"query has {heads} heads, no multiple of the rows' {rows.heads}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: pass a positive number, or None for no cap")
    if choose_backend(backend, query) == "naive":
        return naive.gather_attention(query, rows, ids, scale, softcap)
    from hf_kvret_kernels.gather_attention import triton

    with launching_on(query):
        return triton.gather_attention(query, rows, ids, scale, softcap)
