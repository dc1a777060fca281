"""PagedRows whose keys and values lie apart in each page, against the same rows side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.page_copy import copy_pages
from hf_kvret_kernels.paged import PagedRows, join_sides, lay_apart
from hf_kvret_kernels.resident import fetch

HEADS = 2
TABLE = [[0, 5, 2, 8], [7, 1, 6, 3], [4, 5, 5, 0]]
# Page length, bytes of a key and of a value: codes and scales of 4 and 3 bits, and odd ones.
SIZES = [(8, 64, 4), (4, 12, 2), (3, 5, 3), (1, 1, 1)]


def _pair(
    place: tuple[str, str], chunks: tuple[int, ...], sizes: tuple[int, int, int]
) -> tuple[PagedRows, PagedRows]:
    """Random bytes side by side, and apart."""
    page_len, key_dim, value_dim = sizes
    shape = sum(chunks), HEADS, page_len, key_dim + value_dim
    pages = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).byte()
    table = torch.tensor(TABLE, dtype=torch.int32, device=place[1])
    near, far = (
        [part.clone().to(place[1]) for part in all_pages.split(chunks)]
        for all_pages in (pages, lay_apart(pages, key_dim))
    )
    return PagedRows(near, table, key_dim), PagedRows(far, table, key_dim, apart=True)


@pytest.mark.factor("chunks", [(9,), (3, 2, 4)], ids=str)
@pytest.mark.factor("sizes", SIZES, ids=str)
@pytest.mark.factor("heads", [HEADS, 2 * HEADS])
def test_rows_are_gathered_as_if_they_lay_side_by_side(
    place: tuple[str, str], chunks: tuple[int, ...], sizes: tuple[int, int, int], heads: int
) -> None:
    together, apart = _pair(place, chunks, sizes)
    generator = torch.Generator().manual_seed(1)
    shape = len(TABLE), heads, 3, 37
    ids = torch.randint(-1, len(TABLE[0]) * sizes[0], shape, generator=generator).int()
    ids[0, 0, 0] = -1
    wanted = together.gather(ids.to(place[1]), backend="naive")
    got = apart.gather(ids.to(place[1]), backend=place[0])
    assert all(map(torch.equal, got, wanted))


@pytest.mark.factor("chunks", [(9,), (3, 2, 4)], ids=str)
@pytest.mark.factor("sizes", SIZES, ids=str)
def test_pages_are_copied_as_if_rows_lay_side_by_side(
    place: tuple[str, str], chunks: tuple[int, ...], sizes: tuple[int, int, int]
) -> None:
    together, apart = _pair(place, chunks, sizes)
    for first, last in ((0, 4), (1, 2)):
        for width in (None, sizes[1], 1):
            wanted = copy_pages(together, first, last, width=width, backend="naive")
            got = copy_pages(apart, first, last, width=width, backend=place[0])
            assert torch.equal(got, wanted)


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
    pages, table = torch.zeros(9, HEADS, 8, 32), torch.tensor(TABLE, dtype=torch.int32)
    apart = PagedRows([pages], table, 16, apart=True)
    ids = torch.zeros(len(TABLE), HEADS, 1, 3, dtype=torch.int32)
    query: Any = torch.zeros(len(TABLE), HEADS, 1, 16)
    for operation in (gather_attention, gather_scores):
        with pytest.raises(ValueError, match=r"rows have apart=True: .* must lie side by side"):
            operation(query, apart, ids, scale=1.0)
    buffer = torch.zeros(len(TABLE), HEADS, 3, 32)
    with pytest.raises(ValueError, match=r"rows have apart=True: a slot has a key and its value"):
        fetch(apart, ids[:, :, 0], ids[:, :, 0], buffer)
