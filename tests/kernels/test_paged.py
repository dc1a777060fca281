"""PagedRows: their form, rows in several memories, keys and values apart, copies of pages."""

import pytest
import torch

from hf_kvret_kernels.paged import PagedRows, copy_pages, lay_apart, select

from .draws import Place, draw, generator
from .paged_rows import TWO_ROWS, Kind, dense_rows, paged

TABLE = torch.tensor(TWO_ROWS, dtype=torch.int32)
CHUNK = torch.zeros(9, 2, 8, 32)


def test_addresses_are_those_of_the_pages_and_are_kept() -> None:
    rows = paged("cpu", TWO_ROWS, (4, 5))
    addresses = rows.addresses()
    assert addresses.tolist() == [page.data_ptr() for chunk in rows.chunks for page in chunk]
    assert rows.addresses() is addresses
    again = PagedRows(rows.chunks, rows.table, rows.key_dim, page_address=addresses)
    assert again.addresses() is addresses


@pytest.mark.parametrize(
    ("dims", "dtype", "expected"),
    [((64, 64), torch.float16, 16), ((40, 20), torch.float16, 8), ((9, 5), torch.bfloat16, 2)],
    ids=str,
)
def test_alignment_is_what_every_key_and_value_has(
    dims: tuple[int, int], dtype: torch.dtype, expected: int
) -> None:
    rows = paged("cpu", TWO_ROWS, dims=dims, dtype=dtype)
    assert rows.alignment_bytes() == expected
    for row in rows.chunks[0].view(-1, rows.width)[:20]:
        assert row.data_ptr() % expected == row[rows.key_dim :].data_ptr() % expected == 0


# Page length, bytes of a key and of a value: codes and scales of 4 and 3 bits, and odd ones.
SIZES = [(8, 64, 4), (3, 5, 3)]


def side_by_side_and_apart(
    device: str, chunks: tuple[int, ...], sizes: tuple[int, int, int]
) -> tuple[PagedRows, PagedRows]:
    """The same random bytes twice."""
    page_len, key_dim, value_dim = sizes
    shape = sum(chunks), 2, page_len, key_dim + value_dim
    pages = torch.randint(0, 256, shape, generator=generator(0)).byte()
    near, far = (
        [part.clone().to(device) for part in every.split(chunks)]
        for every in (pages, lay_apart(pages, key_dim))
    )
    table = TABLE.to(device)
    return PagedRows(near, table, key_dim), PagedRows(far, table, key_dim, apart=True)


@pytest.mark.factor("sizes", SIZES, ids=str)
@pytest.mark.factor("heads", [2, 4])
def test_rows_that_lie_apart_are_read_as_if_they_lay_side_by_side(
    place: Place, sizes: tuple[int, int, int], heads: int
) -> None:
    together, apart = side_by_side_and_apart(place[1], (3, 2, 4), sizes)
    ids = torch.randint(-1, 4 * sizes[0], (2, heads, 3, 37), generator=generator(1)).int()
    ids[0, 0, 0] = -1
    expected = together.gather(ids.to(place[1]), backend="naive")
    assert all(map(torch.equal, apart.gather(ids.to(place[1]), backend=place[0]), expected))
    for width in (None, 1):
        expected = copy_pages(together, 1, 3, width=width, backend="naive")
        assert torch.equal(copy_pages(apart, 1, 3, width=width, backend=place[0]), expected)


@pytest.mark.parametrize(
    ("sizes", "wanted"), [((64, 128, 4), (16, 4)), ((64, 8, 6), (8, 2)), ((3, 5, 4), (1, 1))]
)
def test_each_side_has_its_alignment(sizes: tuple[int, int, int], wanted: tuple[int, int]) -> None:
    """Rows of both, 132 bytes, would be multiples of 4 only."""
    _, apart = side_by_side_and_apart("cpu", (9,), sizes)
    assert apart.chunks[0].data_ptr() % 16 == 0
    assert apart.side_alignments() == wanted


def check_copy(place: Place, rows: PagedRows, first: int, last: int, **options: int) -> None:
    copy = copy_pages(rows, first, last, backend=place[0], **options)
    assert copy.device.type == place[1]
    assert copy.is_contiguous() or "width" in options
    pages = dense_rows(rows)[:, :, first * rows.page_len : last * rows.page_len]
    assert torch.equal(copy.cpu(), pages[..., : options.get("width", rows.width)])


@pytest.mark.factor(
    ("dtype", "page_len", "dims"),
    [
        # Words of two bytes.
        (torch.float16, 1, (3, 4)),
        # Longer than a tile of 16 KiB, and not a multiple of it.
        (torch.float32, 64, (34, 34)),
    ],
)
def test_pages_come_in_the_order_of_the_table(
    place: Place, dtype: torch.dtype, page_len: int, dims: tuple[int, int]
) -> None:
    rows = paged(place[1], TWO_ROWS, (2, 3, 4), page_len=page_len, dims=dims, dtype=dtype)
    # A table that is a view is read by its strides.
    rows.table = rows.table.t().contiguous().t()
    check_copy(place, rows, 1, 3)
    for programs in (1, 3, 1000):
        check_copy(place, rows, 0, 4, programs=programs)


def test_runs_of_pages_are_copied_across_chunks(place: Place) -> None:
    """Consecutive pages, as of a store that only grew; some numbers of each row."""
    table = [list(range(first, first + 12)) for first in (0, 8, 3)]
    rows = paged(place[1], table, (4, 2, 14), page_len=4, dims=(6, 6))
    check_copy(place, rows, 2, 9, width=1)
    check_copy(place, rows, 0, 12, width=12)


def test_pages_of_keys_alone_are_copied(place: Place) -> None:
    rows, _ = Kind((24, 16), in_key=True).rows(place[1], TWO_ROWS, (4, 5))
    check_copy(place, rows, 1, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_pages_are_read_from_the_device() -> None:
    rows = paged("cpu", TWO_ROWS, (4, 5), page_len=64, dims=(128, 128), dtype=torch.bfloat16)
    near = [rows.chunks[0].cuda(), rows.chunks[1].pin_memory()]
    copy = copy_pages(PagedRows(near, rows.table.cuda(), rows.key_dim), 0, 4, programs=2)
    assert torch.equal(copy.cpu(), dense_rows(rows))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_refuses_a_chunk_that_is_not_pinned() -> None:
    chunks = [CHUNK.cuda(), CHUNK.pin_memory(), draw(9, 2, 8, 32)]
    with pytest.raises(ValueError, match="not pinned, cuda:0 cannot read them"):
        PagedRows(chunks, TABLE.cuda(), 16).addresses()


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 0, 5, 1)], ids=str)
@pytest.mark.parametrize("count", [0, 20])
@pytest.mark.parametrize("shape", [(), (2, 4)], ids=str)
def test_entries_are_counted_across_all_chunks(
    sizes: tuple[int, ...], count: int, shape: tuple[int, ...]
) -> None:
    whole = draw(7, *shape, dtype=torch.float16)
    index = torch.randint(0, 7, (count,), generator=generator(1))
    selected = select(whole.split(sizes), index)
    assert selected.dtype == whole.dtype and torch.equal(selected, whole[index])
    # Where it is asked for, and a tensor of its own.
    assert select(whole.split(sizes), index, torch.device("meta")).device.type == "meta"
    selected.fill_(9.0)
    assert not (whole == 9.0).any()
