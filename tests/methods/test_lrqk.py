"""LRQKIndex: its selection apart from the output, upkeep of the factors, and its books."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.methods.flat import FlatIndex
from hf_kvret.methods.lrqk import LRQKIndex
from hf_kvret.testing.cold import cold_tokens

from .codebooks import GROUP, HEADS
from .lrqk_runs import DIM, closed_options, fill
from .watched_stores import normal, overlap, ragged, slot_sets

SCALE = 2 / math.sqrt(DIM)


def _tokens(count: int, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with a spectrum that falls off, as those of real heads do."""
    slope = torch.logspace(0.3, -0.9, DIM)
    queries = normal(seed, batch, HEADS * GROUP, count, DIM) * slope
    return queries, normal(seed + 1, batch, HEADS, count, DIM) * slope * 2


def _by_hand(
    index: LRQKIndex, query: torch.Tensor, budget: int, valid: torch.Tensor, softcap: float | None
) -> list[set[int]]:
    """The best slots by the index's own proxies, in fp64, one query at a time."""
    factors, mean = index._factors, index._mean
    assert factors is not None and mean is not None
    rows = index._proxies.values(index._proxies.rows).double()
    answer = []
    for b in range(len(query)):
        for h in range(HEADS):
            for t in range(query.shape[2]):
                best = torch.full((rows.shape[2],), float("-inf"), dtype=torch.float64)
                for head in range(h * GROUP, (h + 1) * GROUP):
                    q = query[b, head, t].double()
                    number = head * rows.shape[1] // query.shape[1]
                    scores = rows[b, number] @ (q @ factors.to_query[b, number].double())
                    scores = (scores + q @ mean[b, h].double()) * SCALE
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    shares = scores.masked_fill(~valid[b], float("-inf")).log_softmax(0)
                    best = torch.maximum(best, shares.nan_to_num(nan=float("-inf")))
                count = min(budget, int(valid[b].sum()))
                answer.append(set(best.topk(count).indices.tolist()))
    return answer


@pytest.mark.factor("softcap", [None, 3.0])
@pytest.mark.factor("proxy_dtype", ["bfloat16", "int8"])
@pytest.mark.factor("budget", [1, 25, 120])
def test_the_selection_is_the_top_k_of_its_own_proxies(
    budget: int, proxy_dtype: str, softcap: float | None
) -> None:
    queries, keys = _tokens(120)
    keys = keys + 2 * normal(7, 2, HEADS, 1, DIM)
    valid = ragged(2, 120)
    options = closed_options(proxy_dtype=proxy_dtype)
    run = fill(options, queries, keys, valid, (80,), softcap)
    query = _tokens(3, seed=5)[0]
    ids = run.search(query, budget)
    assert ids.shape == (2, HEADS, 3, budget) and ids.dtype == torch.int32
    assert slot_sets(ids) == _by_hand(run.index, query, budget, valid, softcap)


def _low_rank(rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """300 queries and keys in a space of ``rank`` directions, and queries for the best 12 tokens.

    Those score at least 1 above all others, more than bf16 proxies miss (scores of 8 to 2^-9 each).
    """
    basis = torch.linalg.qr(normal(seed, DIM, rank)).Q
    queries = normal(seed + 1, 2, HEADS * GROUP, 300, rank) @ basis.T
    keys = normal(seed + 2, 2, HEADS, 300, rank)
    topic = torch.nn.functional.normalize(normal(seed + 3, 2, HEADS, 1, rank), dim=-1)
    along = (keys * topic).sum(-1, keepdim=True)
    keys = keys - along * topic + along.clamp(max=1) * topic
    keys[:, :, 40:288:21] += (4 - (keys[:, :, 40:288:21] * topic).sum(-1, keepdim=True)) * topic
    return queries, keys @ basis.T, (topic * 2 / SCALE).repeat_interleave(GROUP, dim=1) @ basis.T


@pytest.mark.parametrize("proxy_dtype", ["bfloat16", "int8"])
def test_recall_is_complete_where_the_rank_suffices(proxy_dtype: str) -> None:
    queries, keys, query = _low_rank(12)
    options = closed_options(proxy_dtype=proxy_dtype)
    assert fill(options, queries, keys).recall(query, 12) == 1.0
    # The test can fail: with fewer numbers than there are directions tokens are missed.
    assert fill(options.replace(rank=5), queries, keys).recall(query, 12) < 1.0


def test_a_head_with_longer_queries_does_not_take_the_factors_for_itself() -> None:
    queries, keys = _tokens(400)
    queries = queries @ torch.linalg.qr(normal(9, HEADS * GROUP, DIM, DIM)).Q
    even = fill(closed_options(), queries, keys).index
    queries[:, ::GROUP] *= 30
    uneven = fill(closed_options(), queries, keys).index
    assert even._factors is not None and uneven._factors is not None
    torch.testing.assert_close(
        uneven._factors.to_query @ uneven._factors.to_key.mT,
        even._factors.to_query @ even._factors.to_key.mT,
        rtol=0,
        atol=1e-3,
    )


def test_int8_proxies_are_within_half_a_step_of_bf16_ones() -> None:
    queries, keys = _tokens(500)
    wide, narrow = (
        fill(closed_options(proxy_dtype=d), queries, keys) for d in ("bfloat16", "int8")
    )
    rows, steps = wide.index._proxies.rows.float(), narrow.index._proxies.steps
    assert steps is not None
    values = narrow.index._proxies.values(narrow.index._proxies.rows)
    # Both start from the same bf16 rows; the margin is fp32 rounding of 127 steps.
    assert bool(((values - rows).abs() <= steps * (0.5 + 1e-4)).all())
    assert (narrow.index._proxies.rows.abs().amax(2) == 127).all()
    query = _tokens(4, seed=4)[0]
    assert narrow.recall(query) > wide.recall(query) - 0.05


def test_int8_proxies_that_come_later_keep_to_the_range() -> None:
    queries, keys = _tokens(100)
    mean = keys.mean(2, keepdim=True)
    run = fill(closed_options(proxy_dtype="int8"), queries, keys)
    run.cool(mean + 3 * (keys - mean))
    rows = run.index._proxies.rows
    assert rows.shape[2] == 200 and rows.amin() >= -127 and rows.amax() == 127
    # Where three times the value is in the range, it is kept.
    small = rows[:, :, :100].abs() <= 42
    off = (rows[:, :, 100:].int() - 3 * rows[:, :, :100].int()).abs()[small]
    assert small.any() and off.max() <= 2


def test_a_search_reads_the_proxies_and_the_maps() -> None:
    index = fill(closed_options(), *_tokens(60)).index
    assert index.cost(60, 10).nbytes == 2 * HEADS * (60 * 12 * 2 + DIM * 12 * 4)
    assert index.cost(60, 10).candidates == 0


def test_an_offset_of_all_keys_takes_no_direction() -> None:
    queries, keys = _tokens(400)
    query, shift = _tokens(4, seed=4)[0], 6 * normal(3, 2, HEADS, 1, DIM)
    plain, shifted = (fill(closed_options(rank=3), queries, x) for x in (keys, keys + shift))
    errors = [run.index.stats()["proxy_error"] for run in (plain, shifted)]
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)
    assert overlap(shifted.search(query, 24), plain.search(query, 24)) > 0.95


def test_a_soft_cap_bends_the_whole_score_not_the_centered_one() -> None:
    """All keys share a large part; where the cap saturates depends on it."""
    queries, keys = _tokens(256)
    keys = keys + 2 * normal(3, 2, HEADS, 1, DIM)
    query, softcap = 3 * _tokens(4, seed=4)[0], 6.0
    valid = torch.ones(2, 256, dtype=torch.bool)
    run, exact = fill(closed_options(rank=DIM), queries, keys, softcap=softcap), FlatIndex()
    exact.add(TokenBlock(keys, keys, 0))
    best = exact.search(query, cold_tokens(valid, SCALE, 24, softcap))
    assert overlap(run.search(query, 24), best) > 0.95
    run.softcap = None
    assert overlap(run.search(query, 24), best) < 0.9
    run.softcap, run.index._mean = softcap, torch.zeros_like(run.index._mean)
    assert overlap(run.search(query, 24), best) < 0.9
