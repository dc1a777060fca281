"""LRQKIndex: its selection, the factors over time, its options, and the cache on a small model."""

import copy
import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import LRQKCache
from hf_kvret.methods.lrqk import LRQKConfig, LRQKIndex

from ..kernels.draws import best_places, best_share
from .codebooks import GROUP, HEADS, normal
from .index_runs import IndexRun, overlap, ragged, slot_sets

DIM = 32
SCALE = 2 / math.sqrt(DIM)


def closed_options(**changes: Any) -> LRQKConfig:
    return LRQKConfig.from_options(**{"rank": 12, **changes})


def fill(
    options: LRQKConfig,
    queries: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    cuts: tuple[int, ...] = (),
    softcap: float | None = None,
) -> IndexRun:
    """An index that has read a prompt, in chunks that end at ``cuts``; all of it is cold."""
    run = IndexRun(lambda: LRQKIndex(options), range(len(keys)), dim=DIM, softcap=softcap)
    run.prompt((queries, keys), valid, cuts, recent=0).ready()
    return run


def ask(run: IndexRun, queries: torch.Tensor) -> None:
    """A pass of new tokens, which stay in the window; nothing is due after it."""
    run.see(queries, torch.zeros_like(queries[:, :HEADS]))
    run.ready()


def reprojections(run: IndexRun) -> int:
    return run.index.stats()["reprojections"]


def _tokens(count: int, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with a spectrum that falls off, as those of real heads do."""
    slope = torch.logspace(0.3, -0.9, DIM)
    queries = normal(seed, batch, HEADS * GROUP, count, DIM) * slope
    return queries, normal(seed + 1, batch, HEADS, count, DIM) * slope * 2


def _by_hand(
    index: LRQKIndex, query: torch.Tensor, budget: int, valid: torch.Tensor, softcap: float | None
) -> list[set[int]]:
    """The best slots by the index's own proxies, in fp64."""
    factors, mean = index._factors, index._mean
    assert factors is not None and mean is not None
    steps, heads = index._proxies.steps, query.shape[1]
    rows = index._proxies.rows.float() * (1.0 if steps is None else steps)
    # A set of proxies, a map and a mean key for each query head.
    rows, to_query, mean = (
        x.double().repeat_interleave(heads // x.shape[1], dim=1)
        for x in (rows, factors.to_query, mean.unsqueeze(3))
    )
    scores = (query.double() @ to_query @ rows.mT + query.double() @ mean) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    shares = best_share(scores.masked_fill(~valid[:, None, None], -math.inf), HEADS)
    return slot_sets(best_places(shares, budget))


@pytest.mark.factor("softcap", [None, 3.0])
@pytest.mark.factor("proxy_dtype", ["bfloat16", "int8"])
@pytest.mark.factor("budget", [1, 25, 120])
def test_the_best_proxies_are_taken(budget: int, proxy_dtype: str, softcap: float | None) -> None:
    queries, keys = _tokens(120)
    keys = keys + 2 * normal(7, 2, HEADS, 1, DIM)
    valid = ragged(2, 120)
    options = closed_options(proxy_dtype=proxy_dtype)
    run = fill(options, queries, keys, valid, (80,), softcap)
    query = _tokens(3, seed=5)[0]
    ids = run.search(query, budget)
    assert ids.shape == (2, HEADS, 3, budget) and ids.dtype == torch.int32
    assert slot_sets(ids) == _by_hand(run.index, query, budget, valid, softcap)


def test_int8_proxies_are_within_half_a_step_of_bf16_ones() -> None:
    queries, keys = _tokens(500)
    wide = fill(closed_options(proxy_dtype="bfloat16"), queries, keys)
    narrow = fill(closed_options(), queries, keys)
    rows, steps = wide.index._proxies.rows.float(), narrow.index._proxies.steps
    assert steps is not None
    spread = rows.square().mean(2, keepdim=True).sqrt()
    values = narrow.index._proxies.rows * steps
    # bf16 rounds by up to a 256th.
    assert bool(((values - rows).abs() <= steps * (0.5 + 1e-4) + rows.abs() / 256).all())
    torch.testing.assert_close(steps, spread * 8 / 127, rtol=1e-3, atol=0.0)
    query = _tokens(4, seed=4)[0]
    assert narrow.recall(query) > wide.recall(query) - 0.05


@pytest.mark.parametrize(("growth", "move", "count"), [(1.5, 0.0, 0), (5.0, 0.0, 1), (1.0, 9.0, 1)])
def test_keys_outgrow_the_range_of_bytes(growth: float, move: float, count: int) -> None:
    queries, keys = _tokens(100)
    mean = keys.mean(2, keepdim=True)
    # All directions have a number, so that no error but the range's is left.
    run = fill(closed_options(rank=DIM), queries, keys)
    run.cool(mean + growth * (keys - mean) + move)
    rows = run.index._proxies.rows
    assert rows.shape[2] == 200 and rows.amin() >= -127
    assert (rows.amax() == 127) == bool(count)
    run.ready()
    assert reprojections(run) == count and run.index._proxies.rows.abs().amax() < 127
    assert run.recall(_tokens(4, seed=4)[0]) > 0.9


def _queries(count: int, seed: int = 0, first: int = 0, last: int = 16) -> torch.Tensor:
    """``[2, Hq, count, D]``, in directions ``first`` to ``last`` of a basis."""
    basis = torch.linalg.qr(normal(99, DIM, DIM)).Q[:, first:last]
    return normal(seed, 2, HEADS * GROUP, count, last - first) @ basis.T


def _unseen(count: int, seed: int = 3) -> torch.Tensor:
    """A question in directions that no query of ``_document`` has."""
    return _queries(count, seed, 20, 26)


def _document() -> tuple[torch.Tensor, torch.Tensor]:
    return _queries(300), normal(1, 2, HEADS, 300, DIM)


def test_a_prompt_in_chunks_is_projected_once_more_and_selects_like_one_pass() -> None:
    queries, keys = _document()
    options, query = closed_options(rank=24), _queries(3, seed=4)
    whole, chunks = fill(options, queries, keys), fill(options, queries, keys, cuts=(1, 64, 65))
    # The first chunk settles how the heads of a group are weighed against each other.
    assert overlap(chunks.search(query), whole.search(query)) > 0.95
    assert reprojections(whole) == 0 and reprojections(chunks) == 1
    assert chunks.index.stats()["reprojected_rows"] == 2 * HEADS * 300


def test_an_unseen_question_raises_the_error_and_is_served_after_a_projection() -> None:
    run, question = fill(closed_options(rank=24), *_document()), _unseen(5)
    before, missed = run.index.stats()["proxy_error"], run.recall(question)
    run.see(question, torch.zeros_like(question[:, :HEADS]))
    raised = run.index.stats()["proxy_error"]
    assert reprojections(run) == 0 and raised > 2 * before + 0.1 and missed < 0.4
    run.ready()
    stats = run.index.stats()
    assert stats["reprojections"] == 1 and stats["reprojected_rows"] == 2 * HEADS * 300
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
    assert stats["reprojections"] == 1 and stats["reprojected_rows"] == 2 * HEADS * (300 + 40)
    assert run.index._proxies.rows.shape[2] == 300 + 40 and run.recall(question) > 0.97


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
    assert (old[:, 0] < 1e-4).all() and (old[:, 0] > 1.3 * new[:, 0]).all()
    assert (old[:, 1] > 1.3 * run.index._reference_error[:, 1]).all()
    assert (old[:, 1] < 1.1 * new[:, 1]).all()
    run.store.closed = True
    run.ready()
    assert reprojections(run) == 0
    # The next projection needs an even larger error.
    torch.testing.assert_close(run.index._reference_error[:, 1], old[:, 1])


def test_a_saved_index_and_a_fork_remember_that_a_look_is_due() -> None:
    run, question = fill(closed_options(rank=24), *_document()), _unseen(5)
    run.see(question, torch.zeros_like(question[:, :HEADS]))
    for twin in (run.load(), run.fork()):
        twin.ready()
        assert reprojections(twin) == 1


def test_the_rank_follows_the_head_dim_unless_it_is_given() -> None:
    auto = LRQKConfig()
    assert [auto.rank_of(dim) for dim in (16, 64, 128, 256, 1280)] == [16, 64, 64, 128, 256]
    assert [LRQKConfig(proxy_dtype="bfloat16").rank_of(d) for d in (16, 64, 256)] == [16, 32, 64]
    assert (LRQKConfig(rank=None).rank_of(16), LRQKConfig(rank=40).rank_of(64)) == (16, 40)


def test_the_papers_options_are_those_of_its_section_5() -> None:
    paper = LRQKConfig.preset("paper")
    assert (paper.factors, paper.top_k, paper.iterations) == ("als", 2048, 2)
    # The paper's lite tokens.
    assert (paper.recent, paper.fit_recent) == (64, 64)
    assert (paper.penalty, paper.rank_of(128), paper.in_bytes) == (1.0, 32, False)
    with pytest.raises(ValueError, match="are bf16: drop proxy_dtype"):
        LRQKConfig(factors="als", proxy_dtype="int8")
    assert LRQKConfig.preset("paper", top_k=1024, rank=16).top_k == 1024
    assert LRQKConfig().factors == "closed" and LRQKConfig().top_k is None


def test_a_rank_above_the_head_dim_or_that_of_kernels_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"rank=17 is above the head dim 16.*or auto"):
        LRQKCache(llama.config, rank=17)
    config = copy.deepcopy(llama.config)
    config.head_dim = 512
    with pytest.raises(ValueError, match=r"rank=300.* or above 256.*choose 1 to 256"):
        LRQKCache(config, rank=300)
