"""Many consecutive tokens of paged rows as one dense tensor, wherever the pages lie."""

from __future__ import annotations

import torch

from hf_kvret_kernels._dispatch import choose_backend, launching_on
from hf_kvret_kernels.chunks import select
from hf_kvret_kernels.paged import PagedRows


def copy_pages(
    rows: PagedRows,
    first: int,
    last: int,
    *,
    programs: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, Hkv, (last - first) * page_len, Dk + Dv]``: the tokens of some columns of the table.

    A new, contiguous tensor of the rows' dtype on the table's device. The last page is copied
    whole: behind the newest token stands whatever its memory held.

    Args:
        rows: on the table's device; with ``"triton"`` also in pinned host memory, or in both.
        first, last: columns ``first .. last`` of the table, at least one.
        programs: of ``"triton"``, how many programs share the work; None for as many as there is
            work for. Few of them leave the rest of the device to others, for rows that come over a
            bus anyway.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``. The host is never waited for with
            ``"triton"``, nor with ``"naive"`` where all rows lie in one chunk.

    Raises:
        ValueError: columns that the table does not have, ``programs`` below 1, rows that the
            backend can't read, an unknown backend.
        ImportError: ``"triton"`` without Triton.
    """
    if not 0 <= first < last <= rows.table.shape[1]:
        raise ValueError(
            f"columns {first} .. {last}: the table has {rows.table.shape[1]} of them, and at least "
            "one must be asked for"
        )
    if programs is not None and programs < 1:
        raise ValueError(f"programs={programs}: at least 1, or None for as many as there is work")
    if choose_backend(backend, rows.table) == "naive":
        return _copy_with_torch(rows, first, last)
    from hf_kvret_kernels.page_copy_triton import copy_pages as copy_with_triton

    with launching_on(rows.table):
        return copy_with_triton(rows, first, last, programs)


def _copy_with_torch(rows: PagedRows, first: int, last: int) -> torch.Tensor:
    for chunk in rows.chunks:
        if chunk.device != rows.table.device:
            raise ValueError(
                f"rows lie on {chunk.device}, the page table on {rows.table.device}: use "
                "backend='triton' with pinned rows, or move the table"
            )
    table = rows.table[:, first:last].long()
    pages = select(rows.chunks, table.reshape(-1))
    pages = pages.view(*table.shape, *pages.shape[1:])
    return pages.transpose(1, 2).flatten(2, 3).contiguous()
