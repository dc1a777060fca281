"""Scores from proxies against float64."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret_kernels import proxy

from .draws import Place, generator, moved_with_room

INF = float("inf")
# The error may be this share of the sum of a score's absolute products. fp32 sums of 200 products,
# rounded or cut off by tensor cores, come to a tenth of it; a query cast to 11 bits misses by more.
SHARE_OF_SIZE = 4e-6


def random_rows(*shape: int, dtype: torch.dtype, seed: int = 1, spare: int = 0) -> torch.Tensor:
    """``[B, F, n, r]``; with ``spare`` a view of a buffer whose spare rows are poisoned."""
    batch, sets, length, rank = shape
    if dtype == torch.int8:
        room = torch.full((batch, sets, length + spare, rank), -128, dtype=dtype)
        drawn = torch.randint(-127, 128, shape, generator=generator(seed))
    else:
        room = torch.full((batch, sets, length + spare, rank), math.nan, dtype=dtype)
        drawn = torch.randn(shape, generator=generator(seed))
    room[:, :, :length] = drawn.to(dtype)
    return room[:, :, :length]


def random_query(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Proxies that make scores of one order of magnitude, whatever the dtype of the rows."""
    query = torch.randn(shape, generator=generator(seed))
    return query / 64 if dtype == torch.int8 else query


def expected_relevance(
    query: torch.Tensor,
    rows: torch.Tensor,
    heads: int,
    valid: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Relevance in float64, and for each query the size of what was summed up."""
    missing = torch.zeros(len(rows), rows.shape[2]) if valid is None else ~valid
    missing = missing.bool()[:, None, :, None]
    keys = rows.double().masked_fill(missing, 0.0)
    keys = keys.repeat_interleave(query.shape[1] // rows.shape[1], dim=1)
    shift = torch.zeros(query.shape[:3]) if offset is None else offset
    shift, query = shift.double().unsqueeze(-1), query.double()
    scores = query @ keys.mT + shift
    size = (query.abs() @ keys.abs().mT).amax(-1, keepdim=True) + (softcap or 0) + shift.abs()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(missing.mT, -INF)
    if query.shape[1] > heads:
        scores = scores.log_softmax(-1).nan_to_num(nan=-INF, neginf=-INF)
    result, size = (x.unflatten(1, (heads, -1)).amax(2) for x in (scores, size))
    return result, size


def check_relevance(
    place: Place,
    query: torch.Tensor,
    rows: torch.Tensor,
    heads: int,
    valid: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    softcap: float | None = None,
) -> None:
    backend, device = place
    moved = rows if device == "cpu" else moved_with_room(rows, device)
    got = proxy.relevance(
        query.to(device),
        moved,
        heads,
        valid=None if valid is None else valid.to(device),
        offset=None if offset is None else offset.to(device),
        softcap=softcap,
        backend=backend,
    )
    expected, size = expected_relevance(query, rows, heads, valid, offset, softcap)
    assert got.shape == expected.shape and got.dtype == torch.float32 and got.device.type == device
    got = got.cpu().double()
    assert torch.equal(got == -INF, expected == -INF)
    assert not got.isnan().any()
    error = (got - expected).masked_fill(expected == -INF, 0.0).abs()
    # The size of a score, and of the log of the sum that is taken off it.
    assert (error <= SHARE_OF_SIZE * (size + math.log(rows.shape[2] + 1))).all(), error.max()


@pytest.mark.factor("dtype", proxy.ROW_DTYPES, ids=str)
@pytest.mark.factor("rank", [1, 32, 200])
@pytest.mark.factor(("sets", "heads"), [(2, 4), (1, 2), (4, 1)])
@pytest.mark.factor(("queries", "length"), [(2, 77), (3, 1)])
@pytest.mark.factor("softcap", [None, 8.0])
@pytest.mark.factor("with_offset", [False, True])
def test_relevance_is_the_score_of_a_head_and_the_best_share_of_a_group(
    place: Place,
    with_offset: bool,
    softcap: float | None,
    queries: int,
    length: int,
    sets: int,
    heads: int,
    rank: int,
    dtype: torch.dtype,
) -> None:
    """Several blocks, holes, a sequence without any valid token, spare room full of NaN."""
    rows = random_rows(2, sets, length, rank, dtype=dtype, spare=19)
    query = random_query(2, 4, queries, rank, dtype=dtype)
    valid = torch.rand(2, length, generator=generator(2)) < 0.7
    valid[0, 0], valid[1] = True, False
    offset = 5 * torch.randn(2, 4, queries, generator=generator(13)) if with_offset else None
    check_relevance(place, query, rows, heads, valid, offset, softcap)


@pytest.mark.parametrize("length", [128, 257])
def test_lengths_around_the_borders_of_blocks_and_of_their_chunks(
    place: Place, length: int
) -> None:
    """Masks in rows of 16 bytes and of any length; a chunk, and a whole block, without a token."""
    rows = random_rows(2, 2, length, 20, dtype=torch.bfloat16, spare=3)
    query = random_query(2, 4, 1, 20, dtype=torch.bfloat16)
    for room in (-(-length // 16) * 16, length + 5):
        valid = (torch.rand(2, room, generator=generator(7)) < 0.7)[:, :length]
        valid[0, 128:384] = False
        check_relevance(place, query, rows, 2, valid)


@pytest.mark.factor("dtype", proxy.ROW_DTYPES, ids=str)
@pytest.mark.factor("readers", [1, 3, 9])
def test_a_query_keeps_the_digits_that_its_proxies_do_not_have(
    place: Place, dtype: torch.dtype, readers: int
) -> None:
    """Scores whose leading digits cancel: what stays is in the last bits of the query."""
    backend, device = place
    rows = torch.ones(1, 1, 40, 2)
    rows[..., 1] = -1.0
    query = torch.randn(1, readers, 1, 1, generator=generator(8)).expand(-1, -1, -1, 2).clone()
    query[..., 1] *= 1 + 2.0**-20
    expected = query[..., :1].double() - query[..., 1:].double()
    got = proxy.relevance(query.to(device), rows.to(dtype).to(device), readers, backend=backend)
    torch.testing.assert_close(got.cpu().double(), expected.expand(got.shape), rtol=0.2, atol=1e-8)


def test_the_blocks_of_a_long_text_count_together(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks of scores than are added up at a time, more tokens than are compared at one."""
    if place[0] == "triton":
        from hf_kvret_kernels.proxy import triton

        monkeypatch.setattr(triton, "_SUMS", 4)
    rows = random_rows(1, 1, 2500, 6, dtype=torch.bfloat16)
    query = random_query(1, 4, 2, 6, dtype=torch.bfloat16)
    check_relevance(place, query, rows, 2)
    # Some heads score hundreds in the first block, whose exponentials no fp32 holds.
    rows[:, :, 0] *= 128
    check_relevance(place, query, rows, 2)


def test_many_drafts_of_many_heads_read_one_set(place: Place) -> None:
    """More readers than meet a tile of proxies at a time, and no multiple of them."""
    rows = random_rows(1, 2, 30, 16, dtype=torch.float16)
    query = random_query(1, 10, 7, 16, dtype=torch.float16)
    check_relevance(place, query, rows, 2)
    none = proxy.relevance(query.to(place[1]), rows[:, :, :0].to(place[1]), 2, backend=place[0])
    assert none.shape == (1, 2, 7, 0)


def test_a_share_does_not_depend_on_a_constant_that_a_head_adds(place: Place) -> None:
    """A head whose scores are all 300 higher would win everywhere by raw scores, and overflow."""
    backend, device = place
    rows = torch.zeros(1, 1, 600, 8)
    rows[..., 0] = torch.randn(600, generator=generator(4))
    rows[..., 1] = 1.0
    query = torch.zeros(1, 2, 1, 8)
    query[0, 0, 0, 0] = query[0, 1, 0, 0] = 2.0
    rows, query = rows.to(device), query.to(device)
    plain = proxy.relevance(query, rows, 1, backend=backend)
    query[0, 1, 0, 1] = 300.0
    # 300 of fp32 have a last bit of 3e-5.
    torch.testing.assert_close(
        proxy.relevance(query, rows, 1, backend=backend), plain, rtol=0, atol=2e-4
    )


def test_tokens_that_are_not_valid_may_hold_anything(place: Place) -> None:
    rows = random_rows(1, 2, 70, 16, dtype=torch.bfloat16)
    valid = torch.rand(1, 70, generator=generator(5)) < 0.6
    rows[:, :, ~valid[0]] = math.nan
    query = random_query(1, 4, 1, 16, dtype=torch.bfloat16)
    check_relevance(place, query, rows, 4, valid)
    check_relevance(place, query, rows, 2, valid)
