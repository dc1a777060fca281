"""The check of query, rows and ids that all operations on chosen rows share."""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import check_attention_inputs, check_softcap
from hf_kvret_kernels.paged import PagedRows


def check_chosen_rows(
    query: torch.Tensor,
    rows: PagedRows,
    ids: torch.Tensor,
    softcap: float | None,
    coded_dim: int | None = None,
) -> None:
    """Check the arguments of operations on the rows that ids name.

    Args:
        query, rows, ids, softcap: as of ``gather_attention``.
        coded_dim: Dk of the keys that coded rows stand for; None where rows are of the query's
            dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, gradients, a cap that is no cap.
    """
    check_attention_inputs(query=query)
    rows.check_ids(ids)
    if rows.apart is (coded_dim is None):
        raise ValueError(
            f"rows have apart={rows.apart}: keys and values must lie "
            f"{'side by side' if coded_dim is None else 'apart, as codes and scales do'}"
        )
    batch, heads, queries, width = query.shape
    dtype = rows.dtype if coded_dim is None else query.dtype
    key_dim = rows.key_dim if coded_dim is None else coded_dim
    if query.dtype != dtype or query.device != rows.table.device or width != key_dim:
        raise ValueError(
            f"query is {query.dtype} on {query.device} with Dk={width}, the rows are {rows.dtype} "
            f"with a page table on {rows.table.device} and Dk={key_dim}: they must agree"
        )
    if ids.shape[0] != batch or ids.shape[2] != queries or ids.shape[1] not in (rows.heads, heads):
        raise ValueError(
            f"ids has shape {tuple(ids.shape)}: pass [{batch}, {rows.heads} or {heads}, {queries}, "
            f"K] for a query of shape {tuple(query.shape)}"
        )
    if heads % rows.heads:
        raise ValueError(f"query has {heads} heads, no multiple of the rows' {rows.heads}")
    check_softcap(softcap)
