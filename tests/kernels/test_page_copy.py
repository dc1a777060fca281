"""copy_pages against indexing by hand: odd widths, many chunks, any table, few programs."""

from __future__ import annotations

import pytest
import torch

from hf_kvret_kernels.page_copy import copy_pages
from hf_kvret_kernels.paged import PagedRows

HEADS = 2


def _rows(
    dtype: torch.dtype, page_len: int, width: int, pages: tuple[int, ...], device: str = "cpu"
) -> PagedRows:
    """Three rows of a batch, whose five pages each are any of those there are, some twice."""
    generator = torch.Generator().manual_seed(0)
    shape = (HEADS, page_len, width)
    if dtype == torch.uint8:
        chunks = [torch.randint(0, 256, (n, *shape), generator=generator).to(dtype) for n in pages]
    else:
        chunks = [torch.randn(n, *shape, generator=generator).to(dtype) for n in pages]
    table = torch.randint(0, sum(pages), (3, 5), generator=generator, dtype=torch.int32)
    return PagedRows([chunk.to(device) for chunk in chunks], table.to(device), width // 2)


def _by_hand(rows: PagedRows, first: int, last: int) -> torch.Tensor:
    pages = torch.cat(rows.chunks).cpu()
    lines = [torch.cat([pages[int(p)] for p in line[first:last]], dim=1) for line in rows.table]
    return torch.stack(lines)


@pytest.mark.factor("pages", [(7,), (2, 1, 4)], ids=["one-chunk", "three-chunks"])
@pytest.mark.factor(
    ("dtype", "page_len", "width"),
    [
        (torch.float32, 4, 10),
        (torch.bfloat16, 4, 6),
        # Words of two bytes, and of one.
        (torch.float16, 1, 7),
        (torch.uint8, 3, 5),
        # Longer than a tile of 16 KiB, and not a multiple of it.
        (torch.float32, 64, 68),
    ],
)
def test_pages_come_in_the_order_of_the_table(
    place: tuple[str, str],
    dtype: torch.dtype,
    page_len: int,
    width: int,
    pages: tuple[int, ...],
) -> None:
    backend, device = place
    rows = _rows(dtype, page_len, width, pages, device)
    for first, last in ((0, 5), (1, 4), (4, 5)):
        got = copy_pages(rows, first, last, backend=backend)
        assert got.is_contiguous() and got.device.type == device
        assert torch.equal(got.cpu(), _by_hand(rows, first, last))


@pytest.mark.parametrize("width", [1, 6, 12])
@pytest.mark.parametrize("first_pages", [(0, 20, 7), (3, 3, 12)])
def test_runs_of_pages_are_copied_across_chunks(
    place: tuple[str, str], first_pages: tuple[int, ...], width: int
) -> None:
    """Consecutive pages, as of a store that only grew; some numbers of each row."""
    backend, device = place
    rows = _rows(torch.float32, 4, 12, (10, 5, 35), device)
    table = torch.tensor(first_pages)[:, None] + torch.arange(30)
    rows = PagedRows(rows.chunks, table.int().to(device), rows.key_dim)
    for first, last in ((0, 30), (2, 9)):
        got = copy_pages(rows, first, last, width=width, backend=backend)
        assert torch.equal(got.cpu(), _by_hand(rows, first, last)[..., :width])


def test_a_width_that_rows_do_not_have_is_refused() -> None:
    rows = _rows(torch.float32, 4, 10, (7,))
    for width in (0, 11):
        with pytest.raises(ValueError, match=f"width={width}: rows have 10 numbers"):
            copy_pages(rows, 0, 5, width=width)


@pytest.mark.factor("programs", [1, 3, 1000])
def test_any_number_of_programs_does_all_the_work(place: tuple[str, str], programs: int) -> None:
    backend, device = place
    rows = _rows(torch.bfloat16, 4, 12, (7,), device)
    got = copy_pages(rows, 0, 5, programs=programs, backend=backend)
    assert torch.equal(got.cpu(), _by_hand(rows, 0, 5))


def test_a_table_that_is_a_view_is_read_by_its_strides(place: tuple[str, str]) -> None:
    backend, device = place
    rows = _rows(torch.float32, 4, 6, (7,), device)
    turned = PagedRows(rows.chunks, rows.table.t().contiguous().t()[1:], rows.key_dim)
    assert torch.equal(copy_pages(turned, 1, 4, backend=backend).cpu(), _by_hand(turned, 1, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_pages_are_read_from_the_device() -> None:
    rows = _rows(torch.bfloat16, 64, 256, (3, 4))
    near = [rows.chunks[0].cuda(), rows.chunks[1].pin_memory()]
    mixed = PagedRows(near, rows.table.cuda(), rows.key_dim)
    got = copy_pages(mixed, 0, 5, programs=2)
    assert torch.equal(got.cpu(), _by_hand(rows, 0, 5))


@pytest.mark.parametrize(("first", "last"), [(0, 6), (-1, 2), (3, 3), (4, 2)])
def test_columns_that_the_table_lacks_are_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match=rf"columns {first} \.\. {last}: the table has 5"):
        copy_pages(_rows(torch.float32, 4, 6, (7,)), first, last)


def test_no_programs_are_refused() -> None:
    with pytest.raises(ValueError, match="programs=0: at least 1"):
        copy_pages(_rows(torch.float32, 4, 6, (7,)), 0, 1, programs=0)
