"""CTkvrIndex over a long generation: pending tokens, dropped centroids, questions, statistics.

One query head for a KV head, so that a query which is a centroid with a list over all keys selects
the exact top-k.
"""

from typing import Any

import pytest
import torch

from hf_kvret.methods.ctkvr import CTkvrConfig, CTkvrIndex
from hf_kvret.methods.ctkvr.inverted_file import Centroids, joined
from hf_kvret.observe.recall import measure_recall

from .codebooks import HEADS, normal
from .index_runs import IndexRun, slot_sets

DIM, BUDGET, PROMPT = 32, 10, 400


class Run(IndexRun):
    """A prompt of ``PROMPT`` cold tokens, then passes and flushes."""

    def __init__(self, options: CTkvrConfig) -> None:
        super().__init__(lambda: CTkvrIndex(options), budget=BUDGET, dim=DIM)
        self.queries = _query(1, PROMPT)
        self.prompt((self.queries, _query(2, PROMPT)), recent=0).ready()

    @property
    def centroids(self) -> Centroids:
        """Those that count, in the order in which they came."""
        return joined(self.index._file.queue.generations())

    def ask(self, query: torch.Tensor) -> torch.Tensor:
        """The selections of a new pass."""
        self.see(query, query)
        self.ready()
        return self.search(query)

    def recall_of(self, query: torch.Tensor) -> float:
        """Overlap with the exact top-k for a new pass."""
        return measure_recall(query, self.ask(query), self.cold()).overlap


def _options(**changes: Any) -> CTkvrConfig:
    few = {"tokens_per_centroid": 16, "max_draft": 4, "following": 0, **changes}
    return CTkvrConfig.from_options(**few)


def _paper(**changes: Any) -> CTkvrConfig:
    return CTkvrConfig.preset("paper", max_draft=4, **changes)


def _at_once(**changes: Any) -> CTkvrConfig:
    """Every query becomes a centroid at once, with what it recalled."""
    return _options(**{"update": 1, "update_lists": "recalled", **changes})


def _query(seed: int, count: int = 1) -> torch.Tensor:
    return normal(seed, 2, HEADS, count, DIM)


def test_tokens_that_left_the_window_are_found_with_a_pending_list_and_lost_without() -> None:
    recalls = {}
    for name, options in (("ours", _options()), ("paper", _paper())):
        run = Run(options)
        query = run.queries[:, :, -1:]
        run.ask(_query(3))
        # All that matters to the query is among the new tokens.
        run.cool(3 * query + 0.5 * _query(4, count=40))
        recalls[name] = run.recall_of(query)
        assert run.index.stats()["pending_tokens"] == 40
    assert recalls == {"ours": 1.0, "paper": 0.0}


def test_tokens_in_place_of_dropped_ones_are_found() -> None:
    run = Run(_options())
    run.crop(PROMPT - 40)
    assert run.index.stats()["pending_tokens"] == 0
    run.cool(3 * run.queries[:, :, -1:] + 0.5 * _query(4, count=40))
    assert run.recall_of(run.queries[:, :, -1:]) == 1.0


def test_more_pending_tokens_than_allowed_join_the_lists() -> None:
    run = Run(_options(pending=50))
    query = run.queries[:, :, -1:]
    run.ask(_query(3))
    for flushed in (30, 60):
        run.cool(3 * query + 0.5 * _query(flushed, count=30))
        assert run.recall_of(query) == 1.0
        builds, pending = (run.index.stats()[name] for name in ("list_builds", "pending_tokens"))
        assert (builds, pending) == ((1, 30) if flushed == 30 else (2, 0))
    assert run.index.cost(460, BUDGET).candidates == 4 * 25


def test_queries_of_steps_get_lists_over_all_keys_at_the_next_flush() -> None:
    run = Run(_options(update=1))
    for step in range(2 * _options().centroids_for(PROMPT)):
        run.ask(_query(5) + 0.1 * _query(100 + step))
    other = _query(6)
    run.ask(other)
    assert run.recall_of(other) < 0.9 and run.index.stats()["list_builds"] == 1
    run.cool(0.01 * _query(7, count=4))
    assert run.recall_of(other) == 1.0 and run.index.stats()["list_builds"] == 2
    run.ask(other)
    assert run.index.stats()["list_builds"] == 2


def test_lists_made_at_once_are_the_best_of_what_was_recalled_and_longer_than_the_budget() -> None:
    run, still, query = Run(_at_once()), Run(_options(update=0)), _query(3)
    run.ask(query)
    newest = run.index._file.queue._fresh.ids_of(slice(-1, None))
    assert ((newest >= 0).sum(-1) == 2.5 * BUDGET).all()
    assert slot_sets(newest) == slot_sets(still.search(query, newest.shape[-1]))


@pytest.mark.parametrize("long", [True, False])
def test_a_question_has_lists_over_all_keys_before_its_answer(long: bool) -> None:
    recalls = {}
    for name, options in (("ours", _options()), ("without", _options(questions=False))):
        run = Run(options)
        run.ask(_query(3))
        question = _query(8, count=6 if long else 3)
        if long:
            # It is attended exactly, without a selection of its own.
            run.see(question, question)
            question = question[:, :, -1:]
        recalls[name] = run.recall_of(question)
    assert recalls["ours"] == 1.0 and recalls["without"] < 0.9


def test_drafts_do_not_read_all_keys_every_time() -> None:
    run = Run(_options())
    run.ask(_query(3))
    for step in range(24):
        run.ask(_query(10 + step, count=4))
    # Once in 32 queries, and once for the prompt.
    assert run.store.readings == 1 + 3


def test_the_newest_centroids_are_those_that_count() -> None:
    run = Run(_at_once(centroids=8))
    for step in range(21):
        run.ask(_query(10 + step))
        lists = run.index._file.queue.recall(run.index._grouped(_query(3)), _options(nprobe=99))
        # The lists of all that count, and of no other.
        assert (lists.unflatten(3, (-1, 25)).amax(-1) >= 0).sum(-1).unique() == 8
    queries, slots = run.centroids
    assert slots[0].tolist() == list(range(PROMPT + 13, PROMPT + 21))
    # The first step selected from the prompt's centroids, which it was one of.
    assert torch.equal(queries[:, :, -1, 0], _query(30)[:, :, 0])


def test_a_query_that_joins_at_once_is_searched_for_by_the_index_alone() -> None:
    query = _query(3)
    # The CPU library chooses no more than a budget, and its list is longer.
    for options, alone in ((_at_once(), True), (_options(), False)):
        run = Run(options)
        run.see(query, query)
        run.ready()
        assert (run.index.host_search(query, run.cold()) is None) is alone


def test_bytes_and_stats_are_of_what_is_held() -> None:
    run = Run(_options(update=0))
    run.ask(_query(3))
    # Room for 64 more, 96 in all: query, norm and 25 ids of 2 bytes a head, and its slot.
    row = HEADS * (DIM * 4 + 4 + 25 * 2) + 8
    metric = 2 * HEADS * DIM * DIM * 4
    assert run.index.nbytes() == 2 * row * 96 + metric
    assert run.index.cost(100, 10).nbytes == metric + 2 * HEADS * (25 * DIM * 4 + 4 * 25 * 2)
    stats = run.index.stats()
    assert (stats["centroids"], stats["keys_scored"]) == (25, 2 * HEADS * PROMPT)
    run.index.crop(0)
    assert run.index.state_dict() == {} and run.index.nbytes() == 0


def test_a_context_that_grows_has_more_centroids_and_keeps_the_old_ones() -> None:
    run = Run(_options(recent=4))
    assert run.centroids.slots.shape == (2, 25)
    # The same again, in one long question: 50 centroids, half of them of the question at most.
    question = _query(8, count=400)
    run.see(question, question)
    run.cool(_query(9, count=400))
    run.ask(_query(3))
    slots = run.centroids.slots[0]
    assert len(slots) == run.index._file.queue.room == 50
    assert int((slots < PROMPT).sum()) == 25 and int(slots.max()) == PROMPT + 399


def test_padding_in_a_neighbours_question_pushes_no_centroid_out() -> None:
    for length in (8, 12):
        run = Run(_options())
        question, valid = _query(8, count=length), torch.ones(2, length, dtype=torch.bool)
        question[0, :, -8:] = _query(9, count=8)[0]
        valid[0, : length - 8] = False
        run.see(question, question, valid)
        run.ready()
        assert int((run.centroids.slots[0] >= 0).sum()) == 25


def test_lists_that_became_short_for_the_budget_are_made_anew() -> None:
    run = Run(_options())
    assert run.index.stats()["list_builds"] == 1
    for budget, builds in ((BUDGET, 1), (12, 1), (16, 2), (16, 2), (10, 2)):
        run.ready(budget)
        run.search(_query(3), budget)
        assert run.index.stats()["list_builds"] == builds
