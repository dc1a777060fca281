"""LRQKIndex over time: chunks of a prompt, drift, crop, reorder, fork and saving."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.methods.lrqk import LRQKIndex
from hf_kvret.testing import all_valid
from hf_kvret.testing.cold import cold_tokens

from .lrqk_runs import CLOSED_SCALE, HEADS, ClosedRun, closed_options, fill
from .watched_stores import normal

GROUP, DIM, LENGTH = 2, 32, 300
SCALE = CLOSED_SCALE


def _queries(count: int, seed: int = 0, first: int = 0, last: int = 16) -> torch.Tensor:
    """``[2, Hq, count, D]``, in directions ``first`` to ``last`` of a basis."""
    basis = torch.linalg.qr(normal(99, DIM, DIM)).Q[:, first:last]
    return normal(seed, 2, HEADS * GROUP, count, last - first) @ basis.T


def _unseen(count: int, seed: int = 3) -> torch.Tensor:
    """A question in directions that no query of ``_document`` has."""
    return _queries(count, seed, 20, 26)


def _document(count: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    return _queries(count), normal(1, 2, HEADS, count, DIM)


@pytest.mark.parametrize("cuts", [(100,), (1, 2, 3), (64, 65, 130, 299)])
def test_a_prompt_in_chunks_is_projected_once_more_and_selects_like_one_pass(
    cuts: tuple[int, ...],
) -> None:
    queries, keys = _document()
    options, query = closed_options(shared=False), _queries(3, seed=4)
    whole, chunks = fill(options, queries, keys), fill(options, queries, keys, cuts=cuts)
    assert torch.equal(chunks.select(query).sort(-1).values, whole.select(query).sort(-1).values)
    assert whole.reprojections == 0 and chunks.reprojections == 1
    assert chunks.index.stats()["reprojected_rows"] == 2 * HEADS * LENGTH


def test_with_shared_factors_chunks_differ_by_how_long_the_first_queries_are() -> None:
    queries, keys = _document()
    options, query = closed_options(), _queries(3, seed=4)
    chunks = fill(options, queries, keys, cuts=(100,)).select(query)
    whole = fill(options, queries, keys).select(query)
    same = (chunks.unsqueeze(-1) == whole.unsqueeze(-2)).any(-1).float().mean()
    # The scale of a head is that of its first pass, which 100 queries tell to a few per cent.
    assert same > 0.97
    even = queries / queries.norm(dim=-1, keepdim=True)
    chunks = fill(options, even, keys, cuts=(100,)).select(query)
    assert torch.equal(
        chunks.sort(-1).values, fill(options, even, keys).select(query).sort(-1).values
    )


def test_an_unseen_question_raises_the_error_and_is_served_after_a_projection() -> None:
    run, question = fill(closed_options(rank=24), *_document()), _unseen(5)
    before, missed = run.index.stats()["proxy_error"], run.recall(question)
    run.see(question, refresh=False)
    raised = run.index.stats()["proxy_error"]
    assert run.reprojections == 0 and raised > 2 * before + 0.1 and missed < 0.4
    run.index.before_search(all_valid(run.store, 2))
    stats = run.index.stats()
    assert stats["reprojections"] == 1 and stats["reprojected_rows"] == 2 * HEADS * LENGTH
    # 16 directions of the document and 6 of the question fit into rank 24; bf16 is left.
    assert stats["proxy_error"] < 0.01 and run.recall(question) > 0.97
    run.store.closed = True
    run.index.before_search(all_valid(run.store, 2))
    run.see(_unseen(4, seed=8))
    assert run.reprojections == 1


@pytest.mark.parametrize("changes", [{"recency": 0.0}, {"drift": math.inf}], ids=str)
def test_without_recency_or_drift_a_question_changes_nothing(changes: dict[str, float]) -> None:
    question = _unseen(30)
    run = fill(closed_options(**changes), *_document())
    before = run.select(question)
    run.see(question)
    assert run.reprojections == 0 and torch.equal(run.select(question), before)
    usual = fill(closed_options(), *_document())
    usual.see(question)
    assert usual.reprojections == 1 and usual.recall(question) > run.recall(question) + 0.2


def test_drafts_like_the_document_read_nothing_again() -> None:
    run = fill(closed_options(), *_document())
    run.store.closed = True
    for number in range(5):
        run.see(_queries(6, seed=20 + number))
    assert run.reprojections == 0


def test_keys_are_not_read_again_before_the_newest_queries_are_others() -> None:
    run = fill(closed_options(rank=24), *_document())
    run.see(_unseen(20))
    assert run.reprojections == 1
    run.store.closed = True
    run.see(_queries(20, 9, 26, 32))
    assert run.reprojections == 1, "20 queries after the keys were read"
    run.store.closed = False
    run.see(_queries(20, 10, 26, 32))
    assert run.reprojections == 2


def test_single_tokens_wait_for_a_flush() -> None:
    run, question = fill(closed_options(rank=24), *_document()), _unseen(40)
    run.store.closed = True
    for token in question.split(1, dim=2):
        run.see(token)
    run.store.closed = False
    run.flush(normal(6, 2, HEADS, 40, DIM))
    assert run.reprojections == 0
    run.see(question[:, :, :1])
    stats = run.index.stats()
    assert stats["reprojections"] == 1 and stats["reprojected_rows"] == 2 * HEADS * (LENGTH + 40)
    assert run.index._proxies.rows.shape[2] == LENGTH + 40 and run.recall(question) > 0.97


def test_a_head_that_gains_nothing_worth_it_does_not_make_up_for_one_that_cannot_gain() -> None:
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
    run.see(question, refresh=False)
    old, new = run.index._error(factors), run.index._error(run.index._fit())
    assert (old[:, 0] < 1e-4).all() and (old[:, 0] > 2 * new[:, 0]).all()
    assert (old[:, 1] > 1.3 * run.index._reference_error[:, 1]).all()
    assert (old[:, 1] < 1.1 * new[:, 1]).all()
    run.store.closed = True
    run.index.before_search(all_valid(run.store, 2))
    assert run.reprojections == 0
    # What was found not to be worth it is not looked into again and again.
    torch.testing.assert_close(run.index._reference_error[:, 1], old[:, 1])


@pytest.mark.parametrize("proxy_dtype", ["bfloat16", "int8"])
def test_a_neighbour_in_the_batch_changes_nothing(proxy_dtype: str) -> None:
    """Row 1 asks what its proxies don't serve; row 0 keeps the very proxies it had."""
    run = fill(closed_options(rank=24, proxy_dtype=proxy_dtype), *_document())
    question = _queries(40, seed=12)
    question[1] = _unseen(40)[1]
    rows = run.index._proxies.rows.clone()
    before = run.select(question[:, :, :1])
    run.see(question)
    assert run.reprojections == 1
    assert torch.equal(run.index._proxies.rows[0], rows[0])
    assert not torch.equal(run.index._proxies.rows[1], rows[1])
    assert torch.equal(run.select(question[:, :, :1])[0].sort(-1).values, before[0].sort(-1).values)


def test_a_flush_is_looked_at_however_soon_it_comes() -> None:
    run = fill(closed_options(rank=24), *_document())
    run.see(_unseen(20))
    for token in _queries(25, 9, 26, 32).split(1, dim=2):
        run.see(token)
    run.flush(normal(6, 2, HEADS, 40, DIM))
    run.see(_queries(1, 9, 26, 32))
    assert run.reprojections == 2


def test_a_crop_keeps_older_tokens_and_lets_the_same_ones_come_again() -> None:
    queries, keys = _document()
    run, query = fill(closed_options(), queries, keys), _queries(3, seed=4)
    expected = run.select(query)
    run.index.crop(LENGTH)
    assert torch.equal(run.select(query), expected)
    for left in (LENGTH - 1, 120, 1):
        twin = run.fork()
        twin.index.crop(left)
        twin.store.crop(left)
        ids = twin.select(query, budget=left)
        assert torch.equal(ids.sort(-1).values, torch.arange(left).int().expand_as(ids))
        twin.flush(keys[:, :, left:])
        assert torch.equal(twin.select(query), expected)
    assert torch.equal(run.select(query), expected)


def test_a_crop_to_nothing_begins_anew() -> None:
    queries, keys = _document()
    run, query = (
        fill(closed_options(), *(x.flip(2) * 3 for x in (queries, keys))),
        _queries(3, seed=4),
    )
    run.see(_unseen(5))
    run.index.crop(0)
    run.store.crop(0)
    assert run.index.nbytes() == 0 and run.index.cost(100, 10).nbytes == 0
    assert run.index.stats() == {"proxy_error": None, "reprojections": 0, "reprojected_rows": 0}
    with pytest.raises(RuntimeError, match="empty"):
        run.index.search(query, cold_tokens(torch.ones(2, 1, dtype=torch.bool), SCALE, 1))
    with pytest.raises(RuntimeError, match="on_forward"):
        run.index.fork().add(TokenBlock(keys, keys, 0))
    run.see(queries, refresh=False)
    run.flush(keys)
    run.index.before_search(all_valid(run.store, 2))
    fresh = fill(closed_options(), queries, keys)
    assert torch.equal(run.select(query), fresh.select(query))
    assert run.index.nbytes() == fresh.index.nbytes()


@pytest.mark.parametrize("proxy_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("order", [[1, 0], [1, 1, 0], [0]], ids=str)
def test_reordered_rows_take_everything_along(order: list[int], proxy_dtype: str) -> None:
    options = closed_options(proxy_dtype=proxy_dtype, rank=24)
    run, query = fill(options, *_document()), _queries(3, seed=4)
    still, rows = fill(options, *_document()), torch.tensor(order)
    run.index.reorder(rows)
    run.store.reorder(rows)
    assert torch.equal(run.select(query[rows]), still.select(query)[rows])
    question, later = _unseen(5), normal(6, 2, HEADS, 30, DIM)
    for each, sequences in ((run, rows), (still, torch.arange(2))):
        each.flush(later[sequences])
        each.see(question[sequences])
    assert run.reprojections == still.reprojections == 1
    assert torch.equal(run.select(question[rows]), still.select(question)[rows])


def test_queries_that_only_a_fork_saw_do_not_count_for_the_original() -> None:
    """Single queries wait to be folded in; those that wait are not shared."""
    run, untouched = (
        fill(closed_options(rank=24), *_document()),
        fill(closed_options(rank=24), *_document()),
    )
    for each in (run, untouched):
        each.see(_queries(1, seed=11))
    fork = run.fork()
    fork.see(_unseen(1))
    assert run.index.nbytes() == untouched.index.nbytes()
    assert run.index.stats() == untouched.index.stats() != fork.index.stats()


def test_a_saved_index_and_a_fork_remember_that_a_look_is_due() -> None:
    run = fill(closed_options(rank=24), *_document())
    run.see(_unseen(5), refresh=False)
    loaded = ClosedRun(LRQKIndex(run.index.options), run.store)
    loaded.index.load_state_dict(run.index.state_dict())
    loaded.index.before_search(all_valid(loaded.store, 2))
    fork = run.fork()
    fork.index.before_search(all_valid(fork.store, 2))
    assert loaded.reprojections == fork.reprojections == 1
