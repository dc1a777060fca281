"""PagedRows whose chunks lie in different memories: what is read, and what is refused."""

from __future__ import annotations

import mmap

import pytest
import torch

from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.resident import fetch

Place = tuple[str, str]
HEADS, PAGE_LEN, KEY_DIM, VALUE_DIM = 2, 8, 16, 24
TABLE = [[0, 5, 2, 8], [7, 1, 6, 3]]


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
    table = torch.tensor(TABLE, dtype=torch.int32, device=place[1])
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
    assert all(torch.equal(got, wanted) for got, wanted in zip(two, one, strict=True))
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


def test_addresses_are_those_of_each_page_where_it_lies() -> None:
    _, split = _rows(("triton", "cpu"), torch.float32, (False, True, False))
    places = [page.data_ptr() for chunk in split.chunks for page in chunk]
    assert split.addresses().tolist() == places


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
