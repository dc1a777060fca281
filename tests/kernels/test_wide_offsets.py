"""Ids and page tables whose numbers lie more than 2^31 elements apart."""

from pathlib import Path

import pytest
import torch

from hf_kvret_kernels import relevance
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.higgs import CodedRows
from hf_kvret_kernels.paged import PagedRows, copy_pages
from hf_kvret_kernels.resident import SlotMap, assign, fetch

from .draws import Place, draw
from .paged_rows import Kind

# Three numbers so far apart: the third is 2^31 behind the first, which wraps to 2^31 before it.
STEP = 1 << 30
IDS = torch.tensor([9, 2, 5], dtype=torch.int32).view(1, 1, 1, 3)


@pytest.fixture
def room(place: Place, tmp_path: Path) -> torch.Tensor:
    """Some 2^32 int32 zeros, of which only pages that are written to take memory."""
    if place != ("triton", "cpu"):
        pytest.skip("offsets are Triton's; on a GPU the room would be real")
    size = (1 << 32) + 64
    return torch.from_file(str(tmp_path / "room"), shared=True, size=size, dtype=torch.int32)


def far_apart(room: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """``numbers [1, ..., 3]``, STEP apart; what a wrapped offset leads to is 0."""
    strides = (*[1] * (numbers.ndim - 1), STEP)
    return torch.as_strided(room, numbers.shape, strides, 1 << 31).copy_(numbers)


def rows_of(bits: int = 16) -> PagedRows | CodedRows:
    """Three pages of one head, in order, for one batch row."""
    rows, _ = Kind((8, 8), bits).rows("cpu", [[0, 1, 2]], (3,), kv_heads=1, page_len=4)
    return rows


def spread(room: torch.Tensor, rows: PagedRows | CodedRows, wide: str) -> torch.Tensor:
    """The ids; they, or the numbers of the table of ``rows``, are far apart from here on."""
    if wide == "ids":
        return far_apart(room, IDS)
    pages = rows.pages if isinstance(rows, CodedRows) else rows
    rows.table = pages.table = far_apart(room, rows.table)
    return IDS


def read(rows: PagedRows | CodedRows, ids: torch.Tensor, backend: str) -> list[torch.Tensor]:
    """All that is read of rows."""
    query = draw(1, 2, 1, 8, seed=1)
    attention = gather_attention(query, rows, ids, scale=0.3, backend=backend)
    if isinstance(rows, CodedRows):
        return [*attention]
    return [
        *attention,
        gather_scores(query, rows, ids, scale=0.3, backend=backend),
        *rows.gather(ids, backend=backend),
        copy_pages(rows, 0, 3, backend=backend),
    ]


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("wide", ["ids", "table"])
def test_rows_are_read(room: torch.Tensor, bits: int, wide: str) -> None:
    rows = rows_of(bits)
    want = read(rows, IDS, "naive")
    torch.testing.assert_close(read(rows, spread(room, rows, wide), "triton"), want)


@pytest.mark.parametrize("wide", ["ids", "table"])
def test_slots_and_what_is_fetched_into_them(room: torch.Tensor, wide: str) -> None:
    rows = rows_of()

    def numbers(count: int) -> torch.Tensor:
        return torch.full((1, 1, count), -1, dtype=torch.int32)

    clock = torch.zeros(1, dtype=torch.int32)
    maps = [SlotMap(numbers(12), numbers(4), numbers(4), clock.clone()) for _ in range(2)]
    buffers = [torch.zeros(1, 1, 4, 16) for _ in range(2)]
    want = assign(maps[0], IDS[:, :, 0], backend="naive")
    fetch(rows, IDS[:, :, 0], want[1], buffers[0], backend="naive")
    ids = spread(room, rows, wide)[:, :, 0]
    got = assign(maps[1], ids, backend="triton")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    fetch(rows, ids, got[1], buffers[1], backend="triton")
    assert torch.equal(*buffers) and buffers[0].any()


@pytest.mark.parametrize("most", ["best", "split"])
def test_scores_of_the_heads_of_a_group(room: torch.Tensor, most: str) -> None:
    from hf_kvret_kernels.top_k.triton import best_ids, split_top_k

    scores = torch.randn(1, 1, 1, 3, 20, generator=torch.Generator().manual_seed(0))
    sums, ids = scores.logsumexp(-1, keepdim=True), torch.arange(20, dtype=torch.int32)
    ids = ids.view(1, 1, 1, 20)
    strides, wide = (1, 1, 1, STEP, 1), room.view(torch.float32)
    apart = torch.as_strided(wide, scores.shape, strides, 1 << 31).copy_(scores)
    want = relevance.best_ids(scores, ids, 5, backend="naive")
    choose = best_ids if most == "best" else split_top_k
    assert torch.equal(choose(apart, 5, ids, sums), want)
