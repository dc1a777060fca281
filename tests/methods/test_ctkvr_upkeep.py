"""CTkvrIndex over a long generation: pending tokens, dropped centroids, questions, statistics.

One query head for a KV head, so that a query which is a centroid with a list over all keys selects
the exact top-k.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_kvret import ColdTokens, TokenBlock
from hf_kvret.methods.ctkvr import CTkvrConfig, CTkvrIndex
from hf_kvret.methods.ctkvr.inverted_file import Centroids, joined
from hf_kvret.observe.recall import measure_recall
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing import all_valid

from .watched_stores import CountingStore, normal

HEADS, DIM, BUDGET = 2, 32, 10
SCALE = 2 / math.sqrt(DIM)
PROMPT = 400


class Run:
    """An index in use: a prompt of ``PROMPT`` cold tokens, then steps and flushes."""

    def __init__(self, options: CTkvrConfig, batch: int = 2) -> None:
        self.index = CTkvrIndex(options)
        self.store = CountingStore(DeviceMemory(torch.device("cpu")))
        self.batch, self.end = batch, PROMPT
        self.queries = normal(1, batch, HEADS, PROMPT, DIM)
        keys = normal(2, batch, HEADS, PROMPT, DIM)
        self.index.on_forward(self.queries, keys, 0, None)
        self.flush(keys)
        self.index.build(self._cold())

    def step(self, query: torch.Tensor, select: bool = True) -> torch.Tensor | None:
        self.index.on_forward(query, query, self.end, None)
        self.end += query.shape[2]
        return self.ask(query) if select else None

    def ask(self, query: torch.Tensor) -> torch.Tensor:
        cold = self._cold()
        self.index.before_search(cold)
        ids = self.index.search(query, cold)
        self.index.after_search(ids)
        return ids

    @property
    def centroids(self) -> Centroids:
        """Those that count, in the order in which they came."""
        assert self.index._file.queue is not None
        return joined(self.index._file.queue.generations())

    def recall(self, query: torch.Tensor) -> float:
        """Overlap with the exact top-k, for a decode step."""
        ids = self.step(query)
        assert ids is not None
        return measure_recall(query, ids, self._cold()).overlap

    def _cold(self) -> ColdTokens:
        return all_valid(self.store, self.batch, budget=BUDGET, scale=SCALE)

    def flush(self, keys: torch.Tensor) -> None:
        block = TokenBlock(keys, keys, len(self.store))
        self.store.append(block)
        self.index.add(block)


def _options(**changes: Any) -> CTkvrConfig:
    return CTkvrConfig.from_options(**{"max_draft": 4, **changes})


def _paper(**changes: Any) -> CTkvrConfig:
    return CTkvrConfig.preset("paper", max_draft=4, **changes)


def _at_once(**changes: Any) -> CTkvrConfig:
    """Every query becomes a centroid at once, with what it recalled."""
    return _options(**{"update": 1, "update_lists": "recalled", **changes})


def _query(seed: int, batch: int = 2, count: int = 1) -> torch.Tensor:
    return normal(seed, batch, HEADS, count, DIM)


def test_tokens_that_left_the_window_are_found_with_a_pending_list_and_lost_without() -> None:
    recalls = {}
    for name, options in (("ours", _options()), ("paper", _paper())):
        run = Run(options)
        query = run.queries[:, :, -1:]
        run.step(_query(3))
        # All that matters to the query is among the new tokens.
        run.flush(3 * query + 0.5 * _query(4, count=40))
        recalls[name] = run.recall(query)
        assert run.index.stats()["pending_tokens"] == 40
    assert recalls == {"ours": 1.0, "paper": 0.0}


def test_more_pending_tokens_than_allowed_join_the_lists() -> None:
    run = Run(_options(pending=50))
    query = run.queries[:, :, -1:]
    run.step(_query(3))
    for flushed in (30, 60):
        run.flush(3 * query + 0.5 * _query(flushed, count=30))
        assert run.recall(query) == 1.0
        builds, pending = (run.index.stats()[name] for name in ("list_builds", "pending_tokens"))
        assert (builds, pending) == ((1, 30) if flushed == 30 else (2, 0))
    assert run.index.cost(460, BUDGET).candidates == 4 * 25


def test_queries_of_steps_get_lists_over_all_keys_at_the_next_flush() -> None:
    run = Run(_options(update=1))
    for step in range(2 * _options().centroids_for(PROMPT)):
        run.step(_query(5) + 0.1 * _query(100 + step))
    other = _query(6)
    run.step(other)
    assert run.recall(other) < 0.9 and run.index.stats()["list_builds"] == 1
    run.flush(0.01 * _query(7, count=4))
    assert run.recall(other) == 1.0 and run.index.stats()["list_builds"] == 2
    run.step(other)
    assert run.index.stats()["list_builds"] == 2


@pytest.mark.parametrize("long", [True, False])
def test_a_question_has_lists_over_all_keys_before_its_answer(long: bool) -> None:
    recalls = {}
    for name, options in (("ours", _options()), ("without", _options(questions=False))):
        run = Run(options)
        run.step(_query(3))
        question = _query(8, count=6 if long else 3)
        # A long one is attended exactly, without a selection of its own.
        ids = run.step(question, select=not long)
        if ids is None:
            recalls[name] = run.recall(question[:, :, -1:])
        else:
            recalls[name] = measure_recall(question, ids, run._cold()).overlap
    assert recalls["ours"] == 1.0 and recalls["without"] < 0.9


def test_drafts_do_not_read_all_keys_every_time() -> None:
    run = Run(_options())
    run.step(_query(3))
    for step in range(24):
        run.step(_query(10 + step, count=4))
    # Once in 32 queries, and once for the prompt.
    assert run.store.readings == 1 + 3


def test_the_newest_centroids_are_those_that_count() -> None:
    run = Run(_at_once(centroids=8))
    for step in range(21):
        run.step(_query(10 + step))
    queries, slots = run.centroids
    assert slots[0].tolist() == list(range(PROMPT + 13, PROMPT + 21))
    # The first step selected from the prompt's centroids, which it was one of.
    assert torch.equal(queries[:, :, -1, 0], _query(30)[:, :, 0])


@pytest.mark.parametrize(("update", "expected"), [(0, 0), (1, 12), (5, 2)])
def test_every_so_many_steps_a_query_joins(update: int, expected: int) -> None:
    run = Run(_at_once(update=update))
    for step in range(13):
        run.step(_query(10 + step))
    assert int((run.centroids.slots > PROMPT).sum()) == 2 * expected


def test_bytes_and_stats_are_of_what_is_held() -> None:
    index = CTkvrIndex(_options(choice="last"))
    queries = _query(1, count=PROMPT)
    index.on_forward(queries, queries, 0, None)
    assert index.nbytes() == 25 * (HEADS * DIM * 4 + 16) * 2 and index.cost(100, 10).nbytes == 0
    run = Run(_options(update=0))
    run.step(_query(3))
    # Room for 64 more, 96 in all: query, norm and 25 ids of 2 bytes a head, and its slot.
    row = HEADS * (DIM * 4 + 4 + 25 * 2) + 8
    assert run.index.nbytes() == 2 * row * 96
    assert run.index.cost(100, 10).nbytes == 2 * HEADS * (25 * DIM * 4 + 4 * 25 * 2)
    stats = run.index.stats()
    assert (stats["centroids"], stats["keys_scored"]) == (25, 2 * HEADS * PROMPT)
    run.index.crop(0)
    assert run.index.state_dict() == {} and run.index.nbytes() == 0


def test_a_context_that_grows_has_more_centroids_and_keeps_the_old_ones() -> None:
    run = Run(_options(recent=4))
    assert run.centroids.slots.shape == (2, 25)
    # The same again, in one long question: 50 centroids, half of them of the question at most.
    question = _query(8, count=400)
    run.step(question, select=False)
    run.flush(_query(9, count=400))
    run.step(_query(3))
    slots = run.centroids.slots[0]
    assert len(slots) == run.index._file.queue.room == 50
    assert int((slots < PROMPT).sum()) == 25 and int(slots.max()) == PROMPT + 399


def test_padding_in_a_neighbours_question_pushes_no_centroid_out() -> None:
    for length in (8, 12):
        run = Run(_options())
        question, valid = _query(8, count=length), torch.ones(2, length, dtype=torch.bool)
        question[0, :, -8:] = _query(9, count=8)[0]
        valid[0, : length - 8] = False
        run.index.on_forward(question, question, run.end, valid)
        run.end += 12
        run.ask(question[:, :, -1:])
        assert int((run.centroids.slots[0] >= 0).sum()) == 25


def test_of_drafts_every_eighth_query_joins() -> None:
    for options in (_options(update=8), _at_once(update=8)):
        run = Run(options.replace(questions=False))
        for step in range(8):
            run.step(_query(10 + step, count=4))
        run.flush(0.01 * _query(4, count=4))
        run.step(_query(3))
        slots = run.centroids.slots[0]
        assert slots[slots >= PROMPT].tolist() == [PROMPT + 8 * i + 7 for i in range(4)]


def test_lists_that_became_short_for_the_budget_are_made_anew() -> None:
    run = Run(_options())
    assert run.index.stats()["list_builds"] == 1
    for budget, builds in ((BUDGET, 1), (12, 1), (16, 2), (16, 2), (10, 2)):
        cold = all_valid(run.store, 2, budget=budget, scale=SCALE)
        run.index.before_search(cold)
        run.index.search(_query(3), cold)
        assert run.index.stats()["list_builds"] == builds
