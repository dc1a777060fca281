"""LRQKIndex over time: chunks of a prompt, drift, and when all keys are projected again."""

from __future__ import annotations

import math

import pytest
import torch

from .codebooks import HEADS
from .lrqk_runs import DIM, ask, closed_options, fill, reprojections
from .watched_stores import normal, overlap

GROUP, LENGTH = 2, 300


def _queries(count: int, seed: int = 0, first: int = 0, last: int = 16) -> torch.Tensor:
    """``[2, Hq, count, D]``, in directions ``first`` to ``last`` of a basis."""
    basis = torch.linalg.qr(normal(99, DIM, DIM)).Q[:, first:last]
    return normal(seed, 2, HEADS * GROUP, count, last - first) @ basis.T


def _unseen(count: int, seed: int = 3) -> torch.Tensor:
    """A question in directions that no query of ``_document`` has."""
    return _queries(count, seed, 20, 26)


def _document(count: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    return _queries(count), normal(1, 2, HEADS, count, DIM)


def test_a_prompt_in_chunks_is_projected_once_more_and_selects_like_one_pass() -> None:
    queries, keys = _document()
    options, query = closed_options(rank=24), _queries(3, seed=4)
    whole, chunks = fill(options, queries, keys), fill(options, queries, keys, cuts=(1, 64, 65))
    # The first chunk settles how the heads of a group are weighed against each other.
    assert overlap(chunks.search(query), whole.search(query)) > 0.95
    assert reprojections(whole) == 0 and reprojections(chunks) == 1
    assert chunks.index.stats()["reprojected_rows"] == 2 * HEADS * LENGTH


def test_an_unseen_question_raises_the_error_and_is_served_after_a_projection() -> None:
    run, question = fill(closed_options(rank=24), *_document()), _unseen(5)
    before, missed = run.index.stats()["proxy_error"], run.recall(question)
    run.see(question, torch.zeros_like(question[:, :HEADS]))
    raised = run.index.stats()["proxy_error"]
    assert reprojections(run) == 0 and raised > 2 * before + 0.1 and missed < 0.4
    run.ready()
    stats = run.index.stats()
    assert stats["reprojections"] == 1 and stats["reprojected_rows"] == 2 * HEADS * LENGTH
    # 16 directions of the document and 6 of the question fit into rank 24; bf16 is left.
    assert stats["proxy_error"] < 0.01 and run.recall(question) > 0.97
    run.store.closed = True
    run.ready()
    ask(run, _unseen(4, seed=8))
    assert reprojections(run) == 1


@pytest.mark.parametrize("changes", [{"recency": 0.0}, {"drift": math.inf}], ids=str)
def test_without_recency_or_drift_a_question_changes_nothing(changes: dict[str, float]) -> None:
    question = _unseen(30)
    run = fill(closed_options(**changes), *_document())
    before = run.search(question)
    ask(run, question)
    assert reprojections(run) == 0 and torch.equal(run.search(question), before)
    usual = fill(closed_options(), *_document())
    ask(usual, question)
    assert reprojections(usual) == 1 and usual.recall(question) > run.recall(question) + 0.2


def test_drafts_like_the_document_read_nothing_again() -> None:
    run = fill(closed_options(), *_document())
    run.store.closed = True
    for number in range(5):
        ask(run, _queries(6, seed=20 + number))
    assert reprojections(run) == 0


def test_keys_are_not_read_again_before_the_newest_queries_are_others() -> None:
    run = fill(closed_options(rank=24), *_document())
    ask(run, _unseen(20))
    assert reprojections(run) == 1
    run.store.closed = True
    ask(run, _queries(20, 9, 26, 32))
    assert reprojections(run) == 1, "20 queries after the keys were read"
    run.store.closed = False
    ask(run, _queries(20, 10, 26, 32))
    assert reprojections(run) == 2


def test_single_tokens_wait_for_a_flush() -> None:
    run, question = fill(closed_options(rank=24), *_document()), _unseen(40)
    run.store.closed = True
    for token in question.split(1, dim=2):
        ask(run, token)
    run.store.closed = False
    run.cool(normal(6, 2, HEADS, 40, DIM))
    assert reprojections(run) == 0
    ask(run, question[:, :, :1])
    stats = run.index.stats()
    assert stats["reprojections"] == 1 and stats["reprojected_rows"] == 2 * HEADS * (LENGTH + 40)
    assert run.index._proxies.rows.shape[2] == LENGTH + 40 and run.recall(question) > 0.97


def test_a_projection_is_decided_for_each_head() -> None:
    """Head 0 could go from a 1e-5 share to none; head 1 got worse and new factors don't help."""
    queries, keys = _queries(600, last=14), normal(1, 2, HEADS, 600, DIM)
    options = closed_options(rank=16, recency=1e-3, drift=1.2)
    queries[:, GROUP:] = normal(30, 2, GROUP, 600, DIM)
    keys[:, 1] *= torch.linspace(1.0, 1.6, DIM)
    run = fill(options, queries, keys)
    factors = run.index._factors
    assert factors is not None
    question = _queries(4, seed=31, last=14)
    question[:, :GROUP] += 1e-2 * _unseen(4)[:, :GROUP]
    # Queries that head 1 serves worst: those in directions that its factors leave out.
    left_out = torch.eye(DIM) - factors.to_query[:, 1] @ factors.to_key[:, 1].mT
    question[:, GROUP:] = 2 * normal(32, 2, GROUP, 4, DIM) @ left_out[:, None]
    run.see(question, torch.zeros_like(question[:, :HEADS]))
    old, new = run.index._error(factors), run.index._error(run.index._fit())
    assert (old[:, 0] < 1e-4).all() and (old[:, 0] > 2 * new[:, 0]).all()
    assert (old[:, 1] > 1.3 * run.index._reference_error[:, 1]).all()
    assert (old[:, 1] < 1.1 * new[:, 1]).all()
    run.store.closed = True
    run.ready()
    assert reprojections(run) == 0
    # The next projection needs an even larger error.
    torch.testing.assert_close(run.index._reference_error[:, 1], old[:, 1])


@pytest.mark.parametrize("proxy_dtype", ["bfloat16", "int8"])
def test_a_neighbour_in_the_batch_changes_nothing(proxy_dtype: str) -> None:
    """Row 1 asks what its proxies don't serve; row 0 keeps the very proxies it had."""
    run = fill(closed_options(rank=24, proxy_dtype=proxy_dtype), *_document())
    question = _queries(40, seed=12)
    question[1] = _unseen(40)[1]
    rows = run.index._proxies.rows.clone()
    before = run.search(question[:, :, :1])
    ask(run, question)
    assert reprojections(run) == 1
    assert torch.equal(run.index._proxies.rows[0], rows[0])
    assert not torch.equal(run.index._proxies.rows[1], rows[1])
    assert torch.equal(run.search(question[:, :, :1])[0].sort(-1).values, before[0].sort(-1).values)


def test_a_saved_index_and_a_fork_remember_that_a_look_is_due() -> None:
    run, question = fill(closed_options(rank=24), *_document()), _unseen(5)
    run.see(question, torch.zeros_like(question[:, :HEADS]))
    for twin in (run.load(), run.fork()):
        twin.ready()
        assert reprojections(twin) == 1
