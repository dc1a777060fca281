"""Making ctkvr's lists takes a bounded amount of memory, and chunks change no list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.methods.ctkvr import inverted_file
from hf_kvret.methods.ctkvr.config import CTkvrConfig
from hf_kvret.methods.ctkvr.inverted_file import Centroids, InvertedFile, joined
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret_kernels.centroid import naive

from .watched_stores import normal

BATCH, HEADS, GROUP, DIM, TOKENS, BUDGET = 2, 4, 2, 32, 3000, 300
BOUND = 16 * 10**6


def _cold() -> ColdTokens:
    keys = normal(0, BATCH, HEADS, TOKENS, DIM)
    store = PagedStore(DeviceMemory(keys.device))
    store.append(TokenBlock(keys, keys, 0))
    valid = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    valid[0, :500] = False
    return ColdTokens(store, Scoring(valid, DIM**-0.5), BUDGET)


def _centroids(seed: int, count: int, padding: int = 0) -> Centroids:
    slots = torch.arange(count).repeat(BATCH, 1)
    slots[0, :padding], slots[1, count // 2 : count // 2 + padding // 3] = -1, -1
    return Centroids(normal(seed, BATCH, HEADS, count, GROUP, DIM), slots)


def _inverted_file(cold: ColdTokens) -> InvertedFile:
    one = InvertedFile(CTkvrConfig(top_k=BUDGET))
    one.list_all(cold, _centroids(1, one.options.centroids_for(TOKENS), 20))
    return one


def _work(name: str, cold: ColdTokens) -> tuple[list[InvertedFile], Callable[[], object]]:
    """The files that have the lists, and the work that makes them."""
    if name == "first":
        files: list[InvertedFile] = []
        return files, lambda: files.append(_inverted_file(cold))
    one = _inverted_file(cold)
    new: list[Centroids] = []
    if name == "anew":
        one.listed_len = -(10**6)
    else:
        new = [_centroids(2, 90, 40)]
    return [one], lambda: one.keep_up(cold, new)


def _lists(name: str) -> tuple[torch.Tensor, ...]:
    files, work = _work(name, _cold())
    work()
    queue = files[0].queue
    assert queue is not None
    every = torch.arange(queue.drop_count, queue.drop_count + len(queue))
    lists = queue._take(every.expand(BATCH, HEADS, 1, -1).contiguous())[:, :, 0]
    return lists, *joined(queue.generations())


def _compare(lists: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """The same lists, but for keys that a rounding of fp32 puts in another order."""
    assert torch.equal(lists[0] < 0, expected[0] < 0)
    assert (lists[0] != expected[0]).float().mean() < 1e-3
    for result, expectation in zip(lists[1:], expected[1:], strict=True):
        assert torch.equal(result, expectation)


WORK = ("first", "anew", "joining")


@pytest.mark.parametrize("name", WORK)
def test_temporaries_are_bounded(
    name: str, temporaries: Callable[[Callable[[], object]], int]
) -> None:
    cold = _cold()
    files, work = _work(name, cold)
    # The queue before is held here too, so that what is left is what was made.
    before = [one.queue for one in files]
    assert temporaries(work) < BOUND
    queue = files[0].queue
    assert (queue is not None and queue not in before) or name == "joining"
    # All scores would be more.
    assert len(queue) * BATCH * HEADS * GROUP * TOKENS * 4 > 2 * BOUND


@pytest.mark.parametrize("name", WORK)
def test_chunks_change_no_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = _lists(name)
    limits: list[tuple[Any, str]] = [
        (naive, "_MOST_HELD"),
        (naive, "_KEYS"),
        (inverted_file, "_ELEMENTS"),
        (inverted_file, "_CHUNK_ELEMENTS"),
    ]
    for module, size in limits:
        monkeypatch.setattr(module, size, 1 << 40)
    _compare(lists, _lists(name))
