"""LRQK's two indexes in use, without a model: a prompt, passes, flushes, forks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from hf_kvret import TokenBlock
from hf_kvret.methods.lrqk import LRQKConfig, LRQKIndex, PaperLRQKIndex
from hf_kvret.observe.recall import measure_recall
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing import all_valid
from hf_kvret.testing.cold import cold_tokens

from .watched_stores import GuardedStore, normal

HEADS = 2
CLOSED_SCALE = 2 / math.sqrt(32)
# Of the published index.
BATCH, GROUP, DIM, RANK = 2, 2, 16, 6
PROMPT, RECENT, BUDGET = 60, 4, 8
SCALE = 0.25


class ClosedRun(NamedTuple):
    """A filled index with closed factors, and its store."""

    index: LRQKIndex
    store: GuardedStore

    def see(self, queries: torch.Tensor, refresh: bool = True) -> None:
        """A pass of new tokens, which stay in the window."""
        self.index.on_forward(queries, torch.zeros_like(queries[:, :HEADS]), len(self.store), None)
        if refresh:
            self.index.before_search(all_valid(self.store, len(queries)))

    def flush(self, keys: torch.Tensor) -> None:
        """Some tokens leave the window."""
        block = TokenBlock(keys, keys, len(self.store))
        self.store.append(block)
        self.index.add(block)

    def select(
        self,
        query: torch.Tensor,
        budget: int = 20,
        valid: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if valid is None:
            valid = torch.ones(len(query), len(self.store), dtype=torch.bool)
        return self.index.search(query, cold_tokens(valid, CLOSED_SCALE, budget, softcap))

    def recall(self, query: torch.Tensor, budget: int = 20) -> float:
        """Overlap with the exact top-k."""
        exact = all_valid(self.store, len(query), scale=CLOSED_SCALE)
        return measure_recall(query, self.select(query, budget), exact).overlap

    def fork(self) -> ClosedRun:
        return ClosedRun(self.index.fork(), self.store.fork())

    @property
    def reprojections(self) -> int:
        return self.index.stats()["reprojections"]


def closed_options(**changes: Any) -> LRQKConfig:
    return LRQKConfig.from_options(**{"rank": 12, **changes})


def fill(
    options: LRQKConfig,
    queries: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    cuts: tuple[int, ...] = (),
) -> ClosedRun:
    """An index with closed factors that has read a prompt, in chunks that end at ``cuts``."""
    run = ClosedRun(LRQKIndex(options), GuardedStore(DeviceMemory(torch.device("cpu"))))
    for start, end in zip((0, *cuts), (*cuts, keys.shape[2]), strict=True):
        mask = None if valid is None else valid[:, start:end]
        block = TokenBlock(keys[:, :, start:end], keys[:, :, start:end], start, mask)
        run.index.on_forward(queries[:, :, start:end], block.keys, start, mask)
        run.store.append(block)
        run.index.add(block)
    run.index.build(all_valid(run.store, len(keys)))
    return run


def paper_options(**changes: Any) -> LRQKConfig:
    sizes = {"rank": RANK, "fit_recent": 5, "max_draft": 4, "init": "top", "top_k": BUDGET}
    return LRQKConfig.preset("paper", **{**sizes, **changes})


def paper_tokens(count: int, seed: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries ``[B, Hq, n, D]`` and keys ``[B, Hkv, n, D]`` with a spectrum that falls off."""
    slope = torch.logspace(0.3, -0.6, DIM)
    queries = normal(seed, batch, HEADS * GROUP, count, DIM) * slope
    return queries, normal(seed + 1, batch, HEADS, count, DIM) * slope


class Run:
    """The published index with its store and all tokens, driven as a layer does it."""

    def __init__(self, options: LRQKConfig) -> None:
        self.index = PaperLRQKIndex(options)
        self.store = PagedStore(DeviceMemory(torch.device("cpu")))
        self.keys = torch.empty(BATCH, HEADS, 0, DIM)
        self.valid = torch.empty(BATCH, 0, dtype=torch.bool)
        self.built = False

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def cold(self) -> int:
        return len(self.store)

    def watch(
        self, queries: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        real = torch.ones(len(keys), keys.shape[2], dtype=torch.bool) if valid is None else valid
        self.index.on_forward(queries, keys, self.length, valid)
        self.keys = torch.cat([self.keys, keys], dim=2) if self.length else keys
        self.valid = torch.cat([self.valid, real], dim=1) if self.valid.numel() else real

    def flush(self, count: int) -> None:
        """The oldest ``count`` tokens of the window go cold."""
        cold = slice(self.cold, self.cold + count)
        keys = self.keys[:, :, cold]
        block = TokenBlock(keys, keys, self.cold, self.valid[:, cold])
        self.store.append(block)
        self.index.add(block)

    def prompt(
        self, count: int = PROMPT, valid: torch.Tensor | None = None, chunks: int = 1
    ) -> Run:
        """A prompt in equal chunks, all but ``RECENT`` tokens of it cold."""
        queries, keys = paper_tokens(count, 0)
        for span in torch.arange(count).chunk(chunks):
            mask = None if valid is None else valid[:, span]
            self.watch(queries[:, :, span], keys[:, :, span], mask)
        self.flush(count - RECENT)
        return self

    def ready(self) -> None:
        prepare = self.index.before_search if self.built else self.index.build
        prepare(all_valid(self.store, len(self.keys)))
        self.built = True

    def select(self, query: torch.Tensor, budget: int = BUDGET) -> torch.Tensor:
        ids = self.index.search(query, cold_tokens(self.valid[:, : self.cold], SCALE, budget))
        self.index.after_search(ids)
        return ids

    def step(self, seed: int, count: int = 1, flush: int = 0) -> torch.Tensor:
        """A pass of ``count`` tokens."""
        queries, keys = (x[: len(self.keys)] for x in paper_tokens(count, 1000 + 10 * seed))
        self.watch(queries, keys)
        self.flush(flush)
        self.ready()
        return self.select(queries)

    def drop(self, count: int) -> None:
        """Forget the newest tokens, which are in the window."""
        self.keys, self.valid = self.keys[:, :, :-count], self.valid[:, :-count]

    def reorder(self, rows: torch.Tensor) -> None:
        self.index.reorder(rows)
        self.store.reorder(rows)
        self.keys, self.valid = self.keys[rows], self.valid[rows]

    def fork(self) -> Run:
        twin = object.__new__(Run)
        vars(twin).update(vars(self))
        twin.index, twin.store = self.index.fork(), self.store.fork()
        return twin

    def load(self) -> Run:
        """The same after a way to the disk and back."""
        twin = self.fork()
        twin.index = PaperLRQKIndex(self.index.options)
        twin.index.load_state_dict(self.index.state_dict())
        return twin
