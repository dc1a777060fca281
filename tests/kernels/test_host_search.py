"""What searches of the compiled library choose, against the naive code of each operation."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret_kernels import host_library as library
from hf_kvret_kernels import host_step, proxy
from hf_kvret_kernels.host_step import FlatSearch, HostCold, ProxySearch, run_step
from hf_kvret_kernels.paris import naive
from hf_kvret_kernels.relevance.naive import best_ids

from .host_steps import (
    FP32_ERROR,
    Shape,
    cold_rows,
    generator,
    near_window,
    paris_search,
)

# The path goes to the tests that take it.
pytestmark = [
    pytest.mark.skipif(bool(host_step.why_not()), reason="the library is not compiled"),
    pytest.mark.factor("path", list(library.PATHS), indirect=True),
]

SHAPES = {
    "plain": Shape(1000),
    "four heads": Shape(777, group=4, queries=2, batch=2, weight_dtype=torch.float16),
    "one head": Shape(4099, dim=64, group=1, queries=2, dtype=torch.float16),
    "wide": Shape(515, dim=256, group=3, weight_dtype=torch.float32),
    "widest": Shape(501, dim=256, group=6, batch=2, candidates=63),
    "odd candidates": Shape(400, group=1, candidates=135),
    "odd candidates of two heads": Shape(400, group=2, candidates=77, m=4),
    "nibbles": Shape(300, dim=80, m=4),
    "nibbles, few tiers": Shape(640, dim=64, m=4, tiers=3, group=5),
    "many heads": Shape(300, dim=32, group=9),
    "tiny head": Shape(130, dim=5, queries=3),
    "latents": Shape(333, dim=576, heads=1, group=16, tiers=3),
    "128 heads of latents": Shape(139, dim=576, heads=1, group=128, tiers=3, candidates=20),
    "short latents": Shape(270, dim=160, group=5, queries=2, weight_dtype=torch.float32),
    "bytes in halves": Shape(515, dim=288, group=3, batch=2),
    "five bytes": Shape(300, dim=320, m=8, group=2, weight_dtype=torch.float16),
    "one block": Shape(300, dim=512, tiers=3, group=8),
    "odd bytes": Shape(259, dim=133, group=3),
    "nibbles of latents": Shape(150, dim=576, m=4, tiers=1, group=2),
    "many blocks": Shape(150, dim=1000, tiers=2, mean_query=True),
    "mean, many tiers": Shape(900, group=4, mean_query=True, tiers=10, dtype=torch.bfloat16),
    "one token": Shape(1, valid=1.1),
    "all are candidates": Shape(200, candidates=200),
    "nothing valid": Shape(100, valid=-1.0),
}


@pytest.mark.factor("name", list(SHAPES))
def test_each_stage_of_paris_is_the_naive_one(name: str, path: str) -> None:
    shape = SHAPES[name]
    query, valid = shape.query(), shape.mask()
    search = paris_search(shape, valid)
    budget = max(1, search.candidates // 3)
    trace = host_step.trace_paris(query, search, valid, budget, scale=0.1, path=path)

    grouped = query.view(shape.batch, shape.heads, -1, shape.queries, shape.dim).float()
    if shape.mean_query:
        grouped = grouped.mean(dim=2, keepdim=True)
    rotated = naive.rotate(grouped.transpose(2, 3), search.signs)
    torch.testing.assert_close(trace.rotated, rotated, rtol=1e-5, atol=1e-5)

    # From here on each stage is given what the stage before it left, to be compared bit by bit.
    bonus = naive.bonus_table(trace.rotated, search.counts, tuple(search.shares.tolist()), shape.m)
    scores = naive.collide(search.codes.sign, bonus, shape.m, valid)
    by_byte = bonus
    if shape.m == 4:
        byte, halves = torch.arange(256), bonus.unflatten(-2, (-1, 2))
        by_byte = halves[..., 0, :][..., byte & 15] + halves[..., 1, :][..., byte >> 4]
    assert torch.equal(trace.points, by_byte)
    assert torch.equal(trace.scores, torch.where(scores == 255, 0, scores + 1))
    candidates = naive.candidates(scores, search.candidates)
    assert torch.equal(trace.candidates, candidates)
    estimates = naive.rerank(
        trace.rotated, search.codes, candidates, search.levels, shape.m, 0.1, None, None
    )
    torch.testing.assert_close(trace.estimates, estimates, rtol=1e-5, atol=FP32_ERROR)
    assert torch.equal(trace.ids, best_ids(trace.estimates, candidates, budget))


def test_a_soft_cap_bends_the_mean_key_too(path: str) -> None:
    shape = Shape(300, group=2)
    query, valid = shape.query(), shape.mask()
    search = paris_search(shape, valid)
    search.mean = torch.randn(1, 2, 128, generator=generator(5))
    trace = host_step.trace_paris(query, search, valid, 9, scale=0.1, softcap=1.5, path=path)
    offset = torch.einsum("bhgqd,bhd->bhqg", query.view(1, 2, 2, 1, 128), search.mean)
    expected = naive.rerank(
        trace.rotated, search.codes, trace.candidates, search.levels, 8, 0.1, 1.5, offset
    )
    torch.testing.assert_close(trace.estimates, expected, rtol=1e-5, atol=FP32_ERROR)


@pytest.mark.factor("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.factor("sets", [1, 2, 6])
@pytest.mark.factor("rank", [1, 20, 64])
@pytest.mark.factor("softcap", [None, 2.0])
def test_proxies_choose_the_tokens_of_their_highest_scores(
    dtype: torch.dtype, sets: int, rank: int, softcap: float | None, path: str
) -> None:
    """Two KV heads of three query heads; a set is shared by all, by a group, or by none."""
    shape = Shape(1100, dim=64, group=3, batch=2, queries=2)
    rows, _, _ = cold_rows(shape)
    proxies = 2 * torch.randn(2, sets, 1100, rank, generator=generator(7))
    proxies = (proxies * 20 if dtype == torch.int8 else proxies).to(dtype)
    query = torch.randn(2, 6, 2, rank, generator=generator(8)) * (0.02 if sets == 6 else 0.1)
    offset = torch.randn(2, 6, 2, generator=generator(9)) if softcap else None
    valid, budget = shape.mask(), 90
    cold = HostCold(rows, ProxySearch(query, proxies, offset), valid, budget)
    window = near_window(shape, 9)
    found = [
        run_step(shape.query(), window, cold, scale=1.0, softcap=softcap, threads=n, path=path)[1]
        for n in (1, 16)
    ]
    assert torch.equal(*found)
    relevance = proxy.relevance(
        query, proxies, 2, valid=valid, offset=offset, softcap=softcap, backend="naive"
    )
    best = relevance.topk(budget, dim=-1).values
    mine = relevance.gather(-1, found[0].long().clamp(min=0)).sort(-1, descending=True).values
    assert (found[0].sort(-1).values.diff(dim=-1) > 0).all()
    torch.testing.assert_close(mine, best, rtol=1e-4, atol=1e-4)


def test_of_equal_tokens_the_first_are_chosen(path: str) -> None:
    shape = Shape(200, dim=16, group=1, heads=1, valid=1.1)
    rows, keys, _ = cold_rows(shape)
    level = torch.arange(200).remainder(3).float()
    same = torch.zeros_like(keys)
    same[..., 0] = level
    query = torch.zeros(1, 1, 1, 16)
    query[..., 0] = 1
    window = near_window(shape, 5)
    _, ids = run_step(
        query, window, HostCold(rows, FlatSearch(same), shape.mask(), 80), scale=1.0, path=path
    )
    twos, ones = (torch.arange(200)[level == x] for x in (2, 1))
    assert ids.flatten().sort().values.tolist() == sorted([*twos, *ones[: 80 - len(twos)]])


@pytest.mark.factor("flush", [False, True])
@pytest.mark.factor("search", ["flat", "paris"])
def test_no_more_than_the_budget_are_chosen_of_scores_that_are_zero(
    search: str, flush: bool, path: str
) -> None:
    # Products with a negative scale are -0, which equals 0; and where subnormal numbers count as
    # 0, the number after 0 does not exceed it.
    shape = Shape(200, group=1, candidates=200)
    rows, keys, _ = cold_rows(shape)
    valid = shape.mask()
    found = FlatSearch(keys) if search == "flat" else paris_search(shape, valid)
    query = torch.zeros_like(shape.query())
    torch.set_flush_denormal(flush)
    try:
        for scale in (1.0, -1.0):
            cold = HostCold(rows, found, valid, 5)
            _, ids = run_step(query, near_window(shape, 5), cold, scale=scale, path=path, threads=1)
            first = valid[0].nonzero()[:5, 0].int()
            assert torch.equal(ids, first.expand_as(ids))
    finally:
        torch.set_flush_denormal(False)


def test_a_query_of_nan_has_no_say_in_what_its_group_chooses(path: str) -> None:
    shape = Shape(403, heads=1, dim=64)
    rows, keys, _ = cold_rows(shape)
    query = shape.query()
    query[:, 1] = math.nan
    cold, window = HostCold(rows, FlatSearch(keys), shape.mask(), 20), near_window(shape, 5)
    _, ids = run_step(query, window, cold, scale=0.1, path=path)
    _, alone = run_step(query[:, :1], window, cold, scale=0.1, path=path)
    assert torch.equal(ids, alone)
