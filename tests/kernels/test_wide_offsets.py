"""Ids and page tables whose numbers lie more than 2^31 elements apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_kvret_kernels import relevance
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.higgs import CodedRows, HiggsCodec, attend
from hf_kvret_kernels.page_copy import copy_pages
from hf_kvret_kernels.paged import PagedRows, lay_apart
from hf_kvret_kernels.resident import SlotMap, assign, fetch

from .draws import Place

# Three numbers so far apart: the third is 2^31 behind the first, which wraps to 2^31 before it.
STEP = 1 << 30
PAGE_LEN, DIM = 4, 8
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


@pytest.fixture
def rows() -> PagedRows:
    """Three pages of one head, in order, for one batch row."""
    torch.manual_seed(0)
    table = torch.arange(3, dtype=torch.int32).view(1, 3)
    return PagedRows([torch.randn(3, 1, PAGE_LEN, 2 * DIM)], table, DIM)


def spread(room: torch.Tensor, rows: PagedRows, wide: str) -> torch.Tensor:
    """The ids; they, or the numbers of the table of ``rows``, are far apart from here on."""
    if wide == "ids":
        return far_apart(room, IDS)
    rows.table = far_apart(room, rows.table)
    return IDS


@pytest.mark.parametrize("wide", ["ids", "table"])
def test_attention(room: torch.Tensor, rows: PagedRows, wide: str) -> None:
    query = torch.randn(1, 2, 1, DIM)
    want = gather_attention(query, rows, IDS, scale=0.3, backend="naive")
    ids = spread(room, rows, wide)
    got = gather_attention(query, rows, ids, scale=0.3, backend="triton")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("wide", ["ids", "table"])
def test_scores_and_copies_of_rows(room: torch.Tensor, rows: PagedRows, wide: str) -> None:
    query = torch.randn(1, 2, 1, DIM)
    want = gather_scores(query, rows, IDS, scale=0.3, backend="naive")
    keys, values = rows.gather(IDS, backend="naive")
    ids = spread(room, rows, wide)
    got = gather_scores(query, rows, ids, scale=0.3, backend="triton")
    torch.testing.assert_close(got, want)
    result = rows.gather(ids, backend="triton")
    assert torch.equal(result[0], keys) and torch.equal(result[1], values)


@pytest.mark.parametrize("wide", ["ids", "table"])
def test_attention_over_coded_rows(room: torch.Tensor, wide: str) -> None:
    codec = HiggsCodec(4, DIM)
    codes, scales = codec.encode(torch.randn(3, 1, PAGE_LEN, 2, DIM), "naive")
    code_bytes = 2 * codes.shape[-1]
    pages = lay_apart(torch.cat([codes.flatten(3), scales.flatten(3)], dim=-1), code_bytes)
    table = torch.arange(3, dtype=torch.int32).view(1, 3)
    rows = PagedRows([pages], table, code_bytes, apart=True)
    query, coded = torch.randn(1, 2, 1, DIM), CodedRows(rows, codec, DIM, DIM)
    want = attend(query, coded, IDS, scale=0.3, backend="naive")
    got = attend(query, coded, spread(room, rows, wide), scale=0.3, backend="triton")
    torch.testing.assert_close(got, want)


def test_copies_of_pages(room: torch.Tensor, rows: PagedRows) -> None:
    want = copy_pages(rows, 0, 3, backend="naive")
    spread(room, rows, "table")
    assert torch.equal(copy_pages(rows, 0, 3, backend="triton"), want)


@pytest.mark.parametrize("wide", ["ids", "table"])
def test_slots_and_what_is_fetched_into_them(
    room: torch.Tensor, rows: PagedRows, wide: str
) -> None:
    clock = torch.zeros(1, dtype=torch.int32)
    maps = [
        SlotMap(
            torch.full((1, 1, 12), -1, dtype=torch.int32),
            torch.full((1, 1, 4), -1, dtype=torch.int32),
            torch.full((1, 1, 4), -1, dtype=torch.int32),
            clock.clone(),
        )
        for _ in range(2)
    ]
    buffers = [torch.zeros(1, 1, 4, 2 * DIM) for _ in range(2)]
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
    result = choose(apart, 5, ids, sums)
    assert torch.equal(result, want)
