"""PagedRows in several memories, with keys and values apart, and copies of their pages."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.page_copy import copy_pages
from hf_kvret_kernels.paged import PagedRows, join_sides, lay_apart
from hf_kvret_kernels.resident import fetch

from .draws import Place
from .paged_rows import dense_rows

HEADS = 2
PAGE_TABLE = [[0, 5, 2, 8], [7, 1, 6, 3], [4, 5, 5, 0]]
# Page length, bytes of a key and of a value: codes and scales of 4 and 3 bits, and odd ones.
SIZES = [(8, 64, 4), (4, 12, 2), (3, 5, 3), (1, 1, 1)]


def _pair(
    place: Place, chunks: tuple[int, ...], sizes: tuple[int, int, int]
) -> tuple[PagedRows, PagedRows]:
    """Random bytes side by side, and apart."""
    page_len, key_dim, value_dim = sizes
    shape = sum(chunks), HEADS, page_len, key_dim + value_dim
    pages = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).byte()
    table = torch.tensor(PAGE_TABLE, dtype=torch.int32, device=place[1])
    near, far = (
        [part.clone().to(place[1]) for part in all_pages.split(chunks)]
        for all_pages in (pages, lay_apart(pages, key_dim))
    )
    return PagedRows(near, table, key_dim), PagedRows(far, table, key_dim, apart=True)


@pytest.mark.factor("chunks", [(9,), (3, 2, 4)], ids=str)
@pytest.mark.factor("sizes", SIZES, ids=str)
@pytest.mark.factor("heads", [HEADS, 2 * HEADS])
def test_rows_are_gathered_as_if_they_lay_side_by_side(
    place: Place, chunks: tuple[int, ...], sizes: tuple[int, int, int], heads: int
) -> None:
    together, apart = _pair(place, chunks, sizes)
    generator = torch.Generator().manual_seed(1)
    shape = len(PAGE_TABLE), heads, 3, 37
    ids = torch.randint(-1, len(PAGE_TABLE[0]) * sizes[0], shape, generator=generator).int()
    ids[0, 0, 0] = -1
    expected = together.gather(ids.to(place[1]), backend="naive")
    got = apart.gather(ids.to(place[1]), backend=place[0])
    assert all(map(torch.equal, got, expected))


@pytest.mark.factor("chunks", [(9,), (3, 2, 4)], ids=str)
@pytest.mark.factor("sizes", SIZES, ids=str)
def test_pages_are_copied_as_if_rows_lay_side_by_side(
    place: Place, chunks: tuple[int, ...], sizes: tuple[int, int, int]
) -> None:
    together, apart = _pair(place, chunks, sizes)
    for first, last in ((0, 4), (1, 2)):
        for width in (None, sizes[1], 1):
            expected = copy_pages(together, first, last, width=width, backend="naive")
            got = copy_pages(apart, first, last, width=width, backend=place[0])
            assert torch.equal(got, expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sides_come_together_again(sizes: tuple[int, int, int]) -> None:
    rows = torch.randn(2, 3, sizes[0], sizes[1] + sizes[2])
    pages = lay_apart(rows, sizes[1])
    assert torch.equal(join_sides(pages, sizes[1]), rows)
    keys = pages.flatten(-2)[..., : sizes[0] * sizes[1]]
    assert torch.equal(keys, rows[..., : sizes[1]].flatten(-2))


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [((64, 128, 4), (16, 4)), ((64, 64, 4), (16, 4)), ((64, 8, 6), (8, 2)), ((3, 5, 4), (1, 1))],
)
def test_each_side_is_aligned_to_its_own_length(
    sizes: tuple[int, int, int], wanted: tuple[int, int]
) -> None:
    """Rows of both, 132 bytes, would be multiples of 4 only."""
    _, apart = _pair(("naive", "cpu"), (9,), sizes)
    assert apart.chunks[0].data_ptr() % 16 == 0
    assert apart.side_alignments() == wanted


def test_operations_on_rows_side_by_side_refuse_others() -> None:
    pages, table = torch.zeros(9, HEADS, 8, 32), torch.tensor(PAGE_TABLE, dtype=torch.int32)
    apart = PagedRows([pages], table, 16, apart=True)
    ids = torch.zeros(len(PAGE_TABLE), HEADS, 1, 3, dtype=torch.int32)
    query: Any = torch.zeros(len(PAGE_TABLE), HEADS, 1, 16)
    for operation in (gather_attention, gather_scores):
        with pytest.raises(ValueError, match=r"rows have apart=True: .* must lie side by side"):
            operation(query, apart, ids, scale=1.0)
    buffer = torch.zeros(len(PAGE_TABLE), HEADS, 3, 32)
    with pytest.raises(ValueError, match=r"rows have apart=True: a slot has a key and its value"):
        fetch(apart, ids[:, :, 0], ids[:, :, 0], buffer)


def dense_pages(rows: PagedRows, first: int, last: int) -> torch.Tensor:
    """Rows of these columns of the table."""
    return dense_rows(rows)[:, :, first * rows.page_len : last * rows.page_len]


def _pages_of(
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
    place: Place,
    dtype: torch.dtype,
    page_len: int,
    width: int,
    pages: tuple[int, ...],
) -> None:
    backend, device = place
    rows = _pages_of(dtype, page_len, width, pages, device)
    for first, last in ((0, 5), (1, 4), (4, 5)):
        got = copy_pages(rows, first, last, backend=backend)
        assert got.is_contiguous() and got.device.type == device
        assert torch.equal(got.cpu(), dense_pages(rows, first, last))


@pytest.mark.parametrize("width", [1, 6, 12])
@pytest.mark.parametrize("first_pages", [(0, 20, 7), (3, 3, 12)])
def test_runs_of_pages_are_copied_across_chunks(
    place: Place, first_pages: tuple[int, ...], width: int
) -> None:
    """Consecutive pages, as of a store that only grew; some numbers of each row."""
    backend, device = place
    rows = _pages_of(torch.float32, 4, 12, (10, 5, 35), device)
    table = torch.tensor(first_pages)[:, None] + torch.arange(30)
    rows = PagedRows(rows.chunks, table.int().to(device), rows.key_dim)
    for first, last in ((0, 30), (2, 9)):
        got = copy_pages(rows, first, last, width=width, backend=backend)
        assert torch.equal(got.cpu(), dense_pages(rows, first, last)[..., :width])


@pytest.mark.factor("programs", [1, 3, 1000])
def test_any_number_of_programs_does_all_the_work(place: Place, programs: int) -> None:
    backend, device = place
    rows = _pages_of(torch.bfloat16, 4, 12, (7,), device)
    got = copy_pages(rows, 0, 5, programs=programs, backend=backend)
    assert torch.equal(got.cpu(), dense_pages(rows, 0, 5))


def test_a_table_that_is_a_view_is_read_by_its_strides(place: Place) -> None:
    backend, device = place
    rows = _pages_of(torch.float32, 4, 6, (7,), device)
    turned = PagedRows(rows.chunks, rows.table.t().contiguous().t()[1:], rows.key_dim)
    assert torch.equal(copy_pages(turned, 1, 4, backend=backend).cpu(), dense_pages(turned, 1, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_pages_are_read_from_the_device() -> None:
    rows = _pages_of(torch.bfloat16, 64, 256, (3, 4))
    near = [rows.chunks[0].cuda(), rows.chunks[1].pin_memory()]
    mixed = PagedRows(near, rows.table.cuda(), rows.key_dim)
    got = copy_pages(mixed, 0, 5, programs=2)
    assert torch.equal(got.cpu(), dense_pages(rows, 0, 5))


@pytest.mark.parametrize(("first", "last"), [(0, 6), (-1, 2), (3, 3), (4, 2)])
def test_columns_that_the_table_lacks_and_no_programs_are_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="programs=0: at least 1"):
        copy_pages(_pages_of(torch.float32, 4, 6, (7,)), 0, 1, programs=0)
    with pytest.raises(ValueError, match=rf"columns {first} \.\. {last}: the table has 5"):
        copy_pages(_pages_of(torch.float32, 4, 6, (7,)), first, last)


PAGE_LEN, KEY_DIM, VALUE_DIM = 8, 16, 24


def _apart(pages: torch.Tensor, place: Place) -> torch.Tensor:
    """The same pages in memory of another kind: mapped, or pinned for a GPU."""
    if place[1] == "cuda":
        return pages.cpu().pin_memory()
    mapped = torch.frombuffer(mmap.mmap(-1, pages.nbytes), dtype=pages.dtype).view(pages.shape)
    return mapped.copy_(pages)


def _rows(place: Place, dtype: torch.dtype, apart: tuple[bool, ...]) -> tuple[PagedRows, PagedRows]:
    """Nine pages in one chunk, and the same in chunks, of which some lie apart."""
    pages = torch.randn(
        9, HEADS, PAGE_LEN, KEY_DIM + VALUE_DIM, generator=torch.Generator().manual_seed(0)
    ).to(place[1], dtype)
    table = torch.tensor(PAGE_TABLE[:2], dtype=torch.int32, device=place[1])
    chunks = [
        _apart(part, place) if far else part.clone()
        for part, far in zip(pages.split(3), apart, strict=True)
    ]
    return PagedRows([pages], table, KEY_DIM), PagedRows(chunks, table, KEY_DIM)


def _ids(heads: int, count: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(2, heads, 3, 4 * PAGE_LEN, generator=generator).argsort(-1)[..., :count]
    holes = torch.rand(order.shape, generator=generator) < 0.2
    return order.int().masked_fill(holes, -1).to(device)


@pytest.mark.factor("apart", [(False, True, True), (True, False, True), (False, True, False)])
@pytest.mark.factor("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.factor("heads", [HEADS, 2 * HEADS])
def test_rows_in_two_memories_are_read_as_in_one(
    place: Place, dtype: torch.dtype, apart: tuple[bool, ...], heads: int
) -> None:
    if place == ("naive", "cuda"):
        pytest.skip("torch can't follow addresses")
    together, split = _rows(place, dtype, apart)
    ids = _ids(heads, 21, place[1])
    query = torch.randn(2, 2 * HEADS, 3, KEY_DIM).to(place[1], dtype)
    one, two = (
        [
            *gather_attention(query, rows, ids, scale=0.3, backend=place[0]),
            gather_scores(query, rows, ids, scale=0.3, softcap=2.0, backend=place[0]),
            *rows.gather(ids, backend=place[0]),
        ]
        for rows in (together, split)
    )
    assert all(torch.equal(got, expected) for got, expected in zip(two, one, strict=True))
    assert not any(part.isnan().any() for part in one)


def test_rows_in_two_memories_are_fetched_into_slots(place: Place) -> None:
    buffers = []
    fetched = torch.full((2, HEADS, 32), -1, dtype=torch.int32, device=place[1])
    fetched[..., :20] = torch.arange(20, device=place[1])
    for rows in _rows(place, torch.float16, (False, True, True)):
        buffers.append(torch.zeros(2, HEADS, 20, rows.width, dtype=rows.dtype, device=place[1]))
        ids = torch.arange(31, -1, -1, dtype=torch.int32, device=place[1]).expand(2, HEADS, 32)
        fetch(rows, ids.contiguous(), fetched, buffers[-1], backend=place[0])
    assert torch.equal(*buffers) and buffers[0].any()


def _pages(device: str, count: int = 2) -> torch.Tensor:
    return torch.empty(count, HEADS, PAGE_LEN, KEY_DIM + VALUE_DIM, device=device)


def test_chunks_may_lie_beside_the_table_and_in_host_memory_only() -> None:
    near = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    for places in (("meta", "cpu"), ("cpu", "meta", "cpu"), ("cpu", "cpu"), ("meta", "meta")):
        rows = PagedRows([_pages(device) for device in places], near, KEY_DIM)
        assert rows.page_len == PAGE_LEN
    here = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"chunks\[1\] is .* on meta: .* some in host memory"):
        PagedRows([_pages("cpu"), _pages("meta")], here, KEY_DIM)
    with pytest.raises(ValueError, match=r"chunks\[1\] is .* on cpu: .* some in host memory"):
        PagedRows([_pages("meta"), _pages("cpu")], here, KEY_DIM)


def test_what_can_not_be_read_is_refused_whichever_chunk_it_is() -> None:
    table = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    ids = torch.zeros(1, HEADS, 1, 3, dtype=torch.int32, device="meta")
    rows = PagedRows([_pages("meta"), _pages("cpu")], table, KEY_DIM)
    with pytest.raises(ValueError, match="the rows lie on cpu, ids on meta"):
        rows.gather(ids, backend="naive")
    with pytest.raises(ValueError, match="the page table is on meta, the rows on cpu: keep"):
        rows.addresses()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_refuses_a_chunk_that_is_not_pinned() -> None:
    table = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    rows = PagedRows([_pages("cuda"), _pages("cpu").pin_memory(), _pages("cpu")], table, KEY_DIM)
    with pytest.raises(ValueError, match="not pinned, cuda:0 cannot read them"):
        rows.addresses()
