"""Scores from proxies against float64."""

import math
from typing import Any

import pytest
import torch

from hf_kvret_kernels import proxy

from .draws import Place, best_places, best_share, draw, generator, run_at

INF = float("inf")
# The error may be this share of the sum of a score's absolute products. fp32 sums of 200 products,
# rounded or cut off by tensor cores, come to a tenth of it; a query cast to 11 bits misses by more.
SHARE_OF_SIZE = 4e-6


def random_rows(*shape: int, dtype: torch.dtype = torch.bfloat16, spare: int = 0) -> torch.Tensor:
    """``[B, F, n, r]``; with ``spare`` a view of a buffer whose spare rows are poisoned."""
    batch, sets, length, rank = shape
    room = torch.empty(batch, sets, length + spare, rank, dtype=dtype).fill_(poison(dtype))
    drawn = draw(*shape, seed=1) * (40 if dtype == torch.int8 else 1)
    room[:, :, :length] = drawn.clamp(-127, 127).to(dtype)
    return room[:, :, :length]


def poison(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point else -128


def check_relevance(
    place: Place,
    query: torch.Tensor,
    rows: torch.Tensor,
    heads: int,
    valid: torch.Tensor | None = None,
    projection: proxy.Projection | None = None,
    softcap: float | None = None,
) -> None:
    """Against float64; the error is measured by the size of what is summed up."""
    options: dict[str, Any] = {"valid": valid, "projection": projection, "softcap": softcap}
    got = run_at(place, proxy.relevance, query, rows, heads, scale=0.5, **options)
    missing = torch.zeros(len(rows), rows.shape[2]) if valid is None else ~valid
    missing = missing.bool()[:, None, :, None]
    keys = rows.double().masked_fill(missing, 0.0)
    query = 0.5 * query.double()
    sizes, shift, shift_size = query.abs(), torch.zeros(1), torch.zeros(1)
    group = query.shape[1] // rows.shape[1]
    if projection is not None:
        maps, steps, mean = (
            each.double().repeat_interleave(group, dim=1) for each in projection if each is not None
        )
        shift, shift_size = query @ mean.unsqueeze(-1), sizes @ mean.abs().unsqueeze(-1)
        query, sizes = query @ maps * steps, sizes @ maps.abs() * steps.abs()
    keys = keys.repeat_interleave(group, dim=1)
    scores = query @ keys.mT + shift
    size = (sizes @ keys.abs().mT).amax(-1, keepdim=True) + (softcap or 0) + shift_size
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(missing.mT, -INF)
    expected = best_share(scores, heads) if query.shape[1] > heads else scores
    size = size.unflatten(1, (heads, -1)).amax(2)
    assert got.shape == expected.shape and got.dtype == torch.float32
    assert torch.equal(got == -INF, expected == -INF) and not got.isnan().any()
    error = (got.double() - expected).masked_fill(expected == -INF, 0.0).abs()
    # The size of a score, and of the log of the sum that is taken off it.
    assert (error <= SHARE_OF_SIZE * (size + math.log(rows.shape[2] + 1))).all(), error.max()


@pytest.mark.factor("dtype", proxy.ROW_DTYPES, ids=str)
@pytest.mark.factor("rank", [1, 40])
@pytest.mark.factor(("sets", "heads"), [(2, 4), (1, 2), (4, 1)])
@pytest.mark.factor(("queries", "length"), [(2, 77), (3, 1)])
@pytest.mark.factor(("softcap", "projects"), [(None, False), (8.0, True)])
def test_relevance_is_the_score_of_a_head_and_the_best_share_of_a_group(
    place: Place,
    projects: bool,
    softcap: float | None,
    queries: int,
    length: int,
    sets: int,
    heads: int,
    rank: int,
    dtype: torch.dtype,
) -> None:
    """Tokens that are not valid, and spare room, may hold anything; a sequence has no other."""
    valid = torch.rand(2, length, generator=generator(2)) < 0.7
    valid[0, 0], valid[1] = True, False
    rows = random_rows(2, sets, length, rank, dtype=dtype, spare=19)
    rows.masked_fill_(~valid[:, None, :, None], poison(dtype))
    # Scores are of one order of magnitude, whatever the dtype of the rows.
    query = draw(2, 4, queries, rank) / (64 if dtype == torch.int8 else 1)
    projection = None
    if projects:
        maps, steps, mean = ((2, sets, *size) for size in ((70, rank), (1, rank), (70,)))
        projection = proxy.Projection(*(draw(*size, seed=13) for size in (maps, steps, mean)))
        query = (draw(2, 4, queries, 70) / (64 if dtype == torch.int8 else 1)).bfloat16()
    check_relevance(place, query, rows, heads, valid, projection, softcap)


@pytest.mark.parametrize(("length", "room"), [(128, 128), (257, 272), (257, 262)])
def test_lengths_around_borders_of_blocks_and_chunks(place: Place, length: int, room: int) -> None:
    """Masks in rows of 16 bytes and of any length; a chunk, and a whole block, without a token."""
    rows, query = random_rows(2, 2, length, 20, spare=3), draw(2, 4, 1, 20)
    valid = (torch.rand(2, room, generator=generator(7)) < 0.7)[:, :length]
    valid[0, 128:384] = False
    check_relevance(place, query, rows, 2, valid)


@pytest.mark.factor("dtype", proxy.ROW_DTYPES, ids=str)
@pytest.mark.factor("readers", [1, 9])
def test_a_query_keeps_its_last_digits(place: Place, dtype: torch.dtype, readers: int) -> None:
    """Scores whose leading digits cancel: what stays is in the last bits of the query."""
    rows = torch.tensor([1.0, -1.0]).expand(1, 1, 40, 2).to(dtype).contiguous()
    query = draw(1, readers, 1, 1, seed=8).repeat(1, 1, 1, 2)
    query *= 10.0 ** torch.arange(readers)[:, None, None]
    query[..., 1] *= 1 + 2.0 ** (-23 if dtype == torch.int8 else -20)
    expected = query[..., :1].double() - query[..., 1:].double()
    got = run_at(place, proxy.relevance, query, rows, readers).double()
    torch.testing.assert_close(got, expected.expand(got.shape), rtol=0.2, atol=1e-8)


def test_blocks_of_a_text_count_together(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs with several blocks each, more tokens than are compared at a time."""
    if place[0] == "triton":
        from hf_kvret_kernels.proxy import triton

        monkeypatch.setattr(triton, "_WAVES", 4)
    rows, query = random_rows(1, 1, 1300, 6), draw(1, 4, 1, 6)
    # Some heads score hundreds in the first block, whose exponentials no fp32 holds.
    rows[:, :, 0] *= 128
    check_relevance(place, query, rows, 2)


def test_many_drafts_of_many_heads_read_one_set(place: Place) -> None:
    """More readers than meet a tile of proxies at a time, and no multiple of them."""
    rows, query = random_rows(1, 2, 30, 16, dtype=torch.float16), draw(1, 10, 7, 16)
    check_relevance(place, query, rows, 2)
    assert run_at(place, proxy.relevance, query, rows[:, :, :0], 2).shape == (1, 2, 7, 0)


def test_a_share_does_not_depend_on_a_constant_that_a_head_adds(place: Place) -> None:
    """A head whose scores are all 300 higher would win everywhere by raw scores, and overflow."""
    rows, query = torch.ones(1, 1, 600, 2), torch.tensor([2.0, 0.0]).repeat(1, 2, 1, 1)
    rows[..., 0] = draw(600, seed=4)
    plain = run_at(place, proxy.relevance, query, rows, 1)
    query[0, 1, 0, 1] = 300.0
    # 300 of fp32 have a last bit of 3e-5.
    higher = run_at(place, proxy.relevance, query, rows, 1)
    torch.testing.assert_close(higher, plain, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("query_heads", "heads"), [(4, 4), (18, 2)])
def test_a_query_is_kept_where_the_next_one_goes(
    place: Place, query_heads: int, heads: int
) -> None:
    """By several programs, of which the last one counts."""
    rows, query = random_rows(2, 2, 40, 16).to(place[1]), draw(2, query_heads, 1, 70).to(place[1])
    projection = proxy.Projection(draw(2, 2, 70, 16).to(place[1]))
    kept = proxy.KeptQueries(draw(2, query_heads, 8, 70), torch.tensor([5, 0]))
    before, kept = kept.rows.clone(), proxy.KeptQueries(*(each.to(place[1]) for each in kept))
    options: dict[str, Any] = {"projection": projection, "backend": place[0]}
    ids = proxy.top_indices(query, rows, heads, 7, kept=kept, **options)
    relevance = proxy.relevance(query, rows, heads, **options).cpu()
    assert torch.equal(ids.cpu(), best_places(relevance, 7))
    before[:, :, 5] = query[:, :, 0].cpu()
    assert torch.equal(kept.rows.cpu(), before) and kept.next.tolist() == [6, 0]
