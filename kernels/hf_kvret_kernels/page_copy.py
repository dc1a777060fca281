"""Many consecutive tokens of paged rows as one dense tensor, wherever the pages lie."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hf_kvret_kernels._dispatch import choose_backend, launching_on
from hf_kvret_kernels.chunks import select
from hf_kvret_kernels.paged import PagedRows, join_sides

# Runs of consecutive pages that are copied one after the other: so many, or one for so many pages.
_MOST_RUNS = 4
_LEAST_RUN = 16


def copy_pages(
    rows: PagedRows,
    first: int,
    last: int,
    *,
    width: int | None = None,
    programs: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, Hkv, (last - first) * page_len, width]``: the tokens of some columns of the table.

    A new tensor of the rows' dtype on the table's device. The last page is copied whole: behind the
    newest token stands whatever its memory held.

    Args:
        rows: on the table's device; with ``"triton"`` also in pinned host memory, or in both.
        first, last: columns ``first .. last`` of the table, at least one.
        width: numbers of each row, from its first on; None for all. The result is
            contiguous, but with ``"triton"``, which copies whole rows, and of rows that lie apart
            a view of all numbers.
        programs: of ``"triton"``, how many programs share the work; None for as many as there is
            work for. Few of them leave the rest of the device to others, for rows that come over a
            bus anyway.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``. The host is never waited for with
            ``"triton"``, nor with ``"naive"`` where all rows lie in one chunk.

    Raises:
        ValueError: columns that the table does not have, a width that rows don't have,
            ``programs`` below 1, rows that the backend can't read, an unknown backend.
        ImportError: ``"triton"`` without Triton.
    """
    if not 0 <= first < last <= rows.table.shape[1]:
        raise ValueError(
            f"columns {first} .. {last}: the table has {rows.table.shape[1]} of them, and at least "
            "one must be asked for"
        )
    if programs is not None and programs < 1:
        raise ValueError(f"programs={programs}: at least 1, or None for as many as there is work")
    width = rows.width if width is None else width
    if not 0 < width <= rows.width:
        raise ValueError(f"width={width}: rows have {rows.width} numbers, ask for 1 to all of them")
    copied_len = rows.width if rows.apart else width
    if choose_backend(backend, rows.table) == "naive":
        result = _copy_with_torch(rows, first, last, copied_len)
    else:
        from hf_kvret_kernels.paged_triton import copy_pages as copy_with_triton

        with launching_on(rows.table):
            result = copy_with_triton(rows, first, last, programs)
    if rows.apart:
        pages = result.unflatten(2, (last - first, rows.page_len))
        result = join_sides(pages, rows.key_dim).flatten(2, 3)
    return result[..., :width]


def _copy_with_torch(rows: PagedRows, first: int, last: int, width: int) -> torch.Tensor:
    for chunk in rows.chunks:
        if chunk.device != rows.table.device:
            raise ValueError(
                f"rows lie on {chunk.device}, the page table on {rows.table.device}: use "
                "backend='triton' with pinned rows, or move the table"
            )
    if rows.table.is_cpu:
        table = rows.table[:, first:last].tolist()
        runs = list(_runs(table, rows.chunks))
        if len(runs) <= _MOST_RUNS + (last - first) * len(table) // _LEAST_RUN:
            return _copy_runs(rows, runs, last - first, width)
    index = rows.table[:, first:last].long()
    pages = select(rows.chunks, index.reshape(-1))
    pages = pages.view(*index.shape, *pages.shape[1:])[..., :width]
    return pages.transpose(1, 2).flatten(2, 3).contiguous()


class _Run(NamedTuple):
    """Consecutive pages of a chunk, and the row and first column of the table that name them."""

    row: int
    column: int
    pages: torch.Tensor


def _runs(table: list[list[int]], chunks: Sequence[torch.Tensor]) -> Iterator[_Run]:
    starts = list(itertools.accumulate((len(chunk) for chunk in chunks), initial=0))
    for row, pages in enumerate(table):
        first = 0
        for column, page in enumerate(pages, start=1):
            if column < len(pages) and pages[column] == page + 1 and page + 1 not in starts:
                continue
            number = bisect.bisect_right(starts, page) - 1
            inside = pages[first] - starts[number]
            yield _Run(row, first, chunks[number][inside : inside + column - first])
            first = column


def _copy_runs(rows: PagedRows, runs: list[_Run], columns: int, width: int) -> torch.Tensor:
    shape = len(rows.table), rows.heads, columns, rows.page_len, width
    result = torch.empty(shape, dtype=rows.dtype, device=rows.table.device)
    for row, column, pages in runs:
        place = result[row, :, column : column + len(pages)]
        place.copy_(pages[..., :width].transpose(0, 1))
    return result.flatten(2, 3)
