"""LRQK's index with closed factors in use, without a model: a prompt, passes, flushes, forks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from hf_kvret import TokenBlock
from hf_kvret.methods.lrqk import LRQKConfig, LRQKIndex
from hf_kvret.observe.recall import measure_recall
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret.testing import all_valid
from hf_kvret.testing.cold import cold_tokens

from .watched_stores import GuardedStore

HEADS = 2
CLOSED_SCALE = 2 / math.sqrt(32)


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
