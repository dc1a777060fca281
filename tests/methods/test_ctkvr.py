"""CTkvr: what the index selects, its options, its choice of queries, and its compact lists."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.methods.ctkvr import CTkvrConfig, CTkvrIndex, inverted_file
from hf_kvret.methods.ctkvr.inverted_file import MOST_TOKENS, Centroids, InvertedFile, InvertedLists
from hf_kvret.methods.ctkvr.sampler import CentroidSampler, MixedSampler
from hf_kvret.observe.recall import exact_scores
from hf_kvret_kernels.relevance import group_relevance

from ..cold import cold_tokens
from .codebooks import GROUP, HEADS, normal
from .index_runs import IndexRun, ragged, slot_sets, store_of

DIM, RECENT = 32, 20


def _options(**changes: Any) -> CTkvrConfig:
    return CTkvrConfig.from_options(**{"tokens_per_centroid": 8, "max_draft": 4, **changes})


def _lists(run: IndexRun, query: torch.Tensor, nprobe: int = 4) -> torch.Tensor:
    """``[B, H, Q, c, width]``: the lists of the centroids nearest to ``query``."""
    grouped, queue = query.unflatten(1, (HEADS, -1)).transpose(2, 3), run.index._file.queue
    options = replace(run.index.options, nprobe=nprobe, following=0)
    return queue.recall(grouped, options).unflatten(3, (-1, queue.width))


def _fill(
    options: CTkvrConfig,
    queries: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    cuts: tuple[int, ...] = (),
    **run: Any,
) -> IndexRun:
    """An index that has read a prompt, all but ``RECENT`` tokens of it cold."""
    filled = IndexRun(lambda: CTkvrIndex(options), dim=DIM, **run)
    filled.prompt((queries, keys), valid, cuts, RECENT).ready()
    return filled


def _prompt(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(seed, 2, HEADS * GROUP, count, DIM), normal(seed + 1, 2, HEADS, count, DIM)


@pytest.mark.factor("softcap", [None, 3.0])
@pytest.mark.factor("budget", [1, 12, 40])
@pytest.mark.factor("cuts", [(), (90,)])
@pytest.mark.factor("group", [1, GROUP])
def test_a_query_that_is_a_centroid_recalls_the_exact_top_k(
    group: int, budget: int, softcap: float | None, cuts: tuple[int, ...]
) -> None:
    queries, keys = _prompt(300)
    queries, valid = queries[:, : HEADS * group], ragged(2, 300)
    hidden = ~valid[:, None, :, None]
    masked = [x.masked_fill(hidden, float("nan")) for x in (queries, keys)]
    run = _fill(_options(), *masked, valid, cuts, budget=budget, softcap=softcap)
    query, length = queries[:, :, [-3, -1]], len(run.store)
    run.see(query, keys[:, :, :2])
    ids = run.search(query)
    assert ids.shape == (2, HEADS, 2, budget) and ids.dtype == torch.int32
    assert all(len(row) == budget for row in slot_sets(ids))
    every_id = torch.arange(length, dtype=torch.int32).expand(2, HEADS, 1, length).contiguous()
    scores = exact_scores(query, run.store.gather(every_id)[0][:, :, 0], run.scale, softcap)
    scores = scores.masked_fill(~valid[:, None, None, :length], float("-inf"))
    best = group_relevance(scores, HEADS).topk(budget).indices
    nearest = _lists(run, query, 1).flatten(3)
    for best_slots, slots in zip(slot_sets(best), slot_sets(nearest), strict=True):
        assert best_slots <= slots
    if group == 1:
        # With more heads than one, what was not recalled is missing in the softmaxes compared.
        assert slot_sets(ids) == slot_sets(best)


@pytest.mark.parametrize("following", [0, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_rerank_takes_the_best_of_what_was_recalled(
    softcap: float | None, following: int
) -> None:
    """That is all of the lists, and so many tokens behind each of their first."""
    queries, keys = _prompt(300)
    options = _options(update=0, following=following)
    run = _fill(options, queries, keys, budget=15, softcap=softcap)
    query = normal(8, 2, HEADS * GROUP, 1, DIM)
    ids = run.search(query)
    lists = _lists(run, query)
    after = lists[..., :following, None] + torch.arange(1, following + 1)
    recalled = torch.cat([lists.flatten(2), after.clamp(max=279).flatten(2)], dim=2)
    scores = exact_scores(query, keys[:, :, :280], run.scale, softcap)
    marked = torch.zeros(2, HEADS, 280, dtype=torch.bool).scatter_(2, recalled.long(), True)
    marked = marked.repeat_interleave(GROUP, dim=1).unsqueeze(2)
    best = group_relevance(scores.masked_fill(~marked, float("-inf")), HEADS).topk(15).indices
    assert slot_sets(ids) == slot_sets(best)


@pytest.mark.parametrize("metric", ["scores", "queries"])
@pytest.mark.parametrize("size", [1.0, 1e30], ids=["plain", "infinite products"])
def test_a_centroid_is_near_that_scores_keys_alike(metric: str, size: float) -> None:
    """Not one that is alike in numbers in which all keys are alike.

    Padding counts for nothing. The plain cosine is taken where products of keys are not finite.
    """
    queries, keys = _prompt(300)
    queries[..., 8:] *= 1.5
    keys[..., 8:] = 20.0
    valid = ragged(2, 300)
    hidden = ~valid[:, None, :, None]
    keys = (size * keys).masked_fill(hidden, float("nan"))
    run = _fill(_options(metric=metric, nprobe=1), queries, keys, valid, budget=15)
    centroids = run.index._file.queue.generations()[0].queries
    other = normal(5, 2, HEADS, 1, GROUP, DIM)
    # The query asks for what a centroid does, and has other noise.
    wanted = torch.cat([centroids[:, :, -1:, :, :8], 1.5 * other[..., 8:]], dim=-1)
    query = wanted.transpose(2, 3).flatten(1, 2)
    same = centroids[:, :, -1].flatten(1, 2).unsqueeze(2)
    is_same = slot_sets(_lists(run, query, 1).flatten(3)) == slot_sets(
        _lists(run, same, 1).flatten(3)
    )
    assert is_same is (metric == "scores" and size == 1)


def test_padding_takes_no_place_among_the_keys_of_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverted_file, "_SAMPLE", 64)
    keys, padding = normal(1, 1, HEADS, 200, DIM), torch.full((1, HEADS, 900, DIM), float("nan"))
    valid = (torch.arange(1100) >= 900)[None]
    metrics = []
    for rows, mask in ((keys, valid[:, 900:]), (torch.cat([padding, keys], dim=2), valid)):
        cold = cold_tokens(mask, DIM**-0.5, 10, store=store_of(rows))
        metrics.append(inverted_file._metric(cold, keys[:, :, :, None]))
    assert metrics[0].dtype == torch.float32 and torch.equal(*metrics)


def test_the_numbers_of_the_paper() -> None:
    paper = CTkvrConfig.preset("paper")
    assert [paper.centroids_for(n) for n in (3, 800, 32_768, 131_072)] == [1, 50, 2048, 2048]
    assert [paper.list_len(131_072, b) for b in (512, 1024)] == [1280, 2560]
    assert (paper.nprobe, paper.update, paper.choice) == (4, 1, "last")
    assert (paper.metric, paper.similarity, paper.following) == ("queries", "max", 0)
    assert (paper.pending, paper.questions, paper.update_lists) == (0, False, "recalled")


def _chosen(
    sampler: CentroidSampler | MixedSampler, count: int, cuts: tuple[int, ...]
) -> list[int]:
    for start, end in zip((0, *cuts), (*cuts, 1600), strict=True):
        queries = torch.arange(start, end).float().view(1, 1, -1, 1).expand(1, 2, -1, 3)
        sampler.add(queries, start, None, 2048)
    queries, slots = sampler.best(count)
    assert torch.equal(queries[0, 1, :, 2].long(), slots[0])
    return slots[0].tolist()


def test_queries_of_dropped_tokens_are_forgotten() -> None:
    sampler = CentroidSampler()
    for start, count in ((0, 10), (5, 2)):
        sampler.add(torch.zeros(1, 2, count, 3), start, None, 16)
    _, slots = sampler.best(16)
    assert slots[slots >= 0].tolist() == [*range(5), 5, 6]


@pytest.mark.parametrize("cuts", [(), (100, 101, 900)])
def test_the_last_queries_are_chosen_or_some_that_are_spread_or_both(cuts: tuple[int, ...]) -> None:
    assert _chosen(CentroidSampler(), 100, cuts) == list(range(1500, 1600))
    assert _chosen(CentroidSampler(spread=True), 100, cuts) == list(range(0, 1600, 16))
    slots = _chosen(MixedSampler(), 100, cuts)
    assert slots[50:] == list(range(1550, 1600)) and max(slots[:50]) < 1550
    gaps = [after - before for before, after in pairwise([0, *slots[:50]])]
    assert max(gaps) <= 64
    assert len(set(_chosen(MixedSampler(), 101, cuts))) == 101
    assert _chosen(MixedSampler(), 1, cuts) == [1599]


def test_mixed_queries_leave_padding_out_row_by_row() -> None:
    sampler = MixedSampler()
    valid = torch.tensor([[False] * 4 + [True] * 6, [True] * 5 + [False] * 5, [False] * 10])
    sampler.add(torch.zeros(3, 2, 10, 3), 0, valid, 8)
    slots = sampler.best(4)[1]
    assert sorted(slots[0].tolist()[2:]) == [8, 9] and set(slots[0].tolist()[:2]) <= {4, 5, 6, 7}
    assert sorted(slots[1].tolist()[2:]) == [3, 4] and set(slots[1].tolist()[:2]) <= {0, 1, 2}
    assert slots[2].tolist() == [-1] * 4


def _ids(lists: InvertedLists) -> list[int]:
    return lists.ids_of(slice(None)).flatten().tolist()


def _centroid(slot: int) -> Centroids:
    return Centroids(torch.ones(1, 1, 1, 2, 4), torch.tensor([[slot]]))


@pytest.mark.parametrize(("tokens", "nbytes"), [(65_535, 2), (65_536, 3), (MOST_TOKENS, 3)])
def test_slots_take_two_bytes_as_long_as_they_can(tokens: int, nbytes: int) -> None:
    most = tokens - 1
    ids = torch.tensor([-1, 0, 1, 32_766, 32_767, 32_768, most - 1, most], dtype=torch.int32)
    lists = InvertedLists(10)
    lists.append(_centroid(7), [ids.view(1, 1, 1, -1)], tokens)
    assert _ids(lists) == [*ids.tolist(), -1, -1]
    assert lists.list_nbytes() == 10 * nbytes
    assert lists.take(torch.zeros(1, 1, 1, 3, dtype=torch.long)).shape == (1, 1, 1, 3, 10)


def test_more_tokens_than_three_bytes_can_name_are_refused() -> None:
    keys = torch.zeros(1, 1, 1, 4)
    index = CTkvrIndex(CTkvrConfig())
    index.add(TokenBlock(keys, keys, start=MOST_TOKENS - 1))
    with pytest.raises(ValueError, match=r"16777216 cold tokens: .* name 16777215 tokens at most"):
        index.add(TokenBlock(keys, keys, start=MOST_TOKENS))


def test_lists_grow_wider_when_slots_do() -> None:
    lists = InvertedLists(2)
    near, far = (torch.tensor([[[[x, -1]]]], dtype=torch.int32) for x in (65_534, 70_000))
    lists.append(_centroid(7), [near], 65_535)
    twin = lists.fork()
    twin.append(_centroid(8), [far], 70_001)
    assert _ids(twin) == [65_534, -1, 70_000, -1]
    assert _ids(lists) == [65_534, -1] and lists.list_nbytes() == 4
    again = InvertedLists(2)
    again.load_state_dict(twin.state_dict())
    assert _ids(again) == _ids(twin) and torch.equal(again.slots, twin.slots)
    again.crop(70_000)
    assert _ids(again) == [65_534, -1, -1, -1]


BOUND = 16 * 10**6


def test_lists_are_made_in_bounded_memory_and_chunks_change_none(
    monkeypatch: pytest.MonkeyPatch, temporaries: Callable[[Callable[[], object]], int]
) -> None:
    keys = normal(0, 2, 4, 3000, DIM)
    valid = torch.ones(2, 3000, dtype=torch.bool)
    valid[0, :500] = False
    cold = cold_tokens(valid, DIM**-0.5, 300, store=store_of(keys))
    slots = torch.arange(187).repeat(2, 1)
    slots[0, :20], slots[1, 93:99] = -1, -1
    centroids = Centroids(normal(1, 2, 4, 187, 2, DIM), slots)
    lists = []
    for size in (None, 1 << 40):
        for name in ("_ELEMENTS", "_CHUNK_ELEMENTS") if size else ():
            monkeypatch.setattr(inverted_file, name, size)
        file = InvertedFile(CTkvrConfig(top_k=300))
        used = temporaries(lambda file=file: file.list_all(cold, centroids))
        assert size or used < BOUND
        assert file.queue is not None and len(file.queue) == 187
        lists.append(file.queue._base.ids_of(slice(None)))
    # All scores would be more.
    assert 2 * BOUND < 187 * 2 * 4 * 2 * 3000 * 4
    # A rounding of fp32 may put keys in another order.
    assert torch.equal(lists[0] < 0, lists[1] < 0)
    assert (lists[0] != lists[1]).float().mean() < 1e-3
