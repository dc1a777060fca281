"""An index driven as a layer drives it: a prompt, steps, flushes, forks; no model.

Its store watches how it is read, and its rows are random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hf_kvret import ColdTokens, TokenBlock
from hf_kvret.contracts.index import Index
from hf_kvret.contracts.store import RowChunks
from hf_kvret.observe.recall import measure_recall
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory

from ..cold import cold_tokens
from .codebooks import DIM, GROUP, HEADS, normal

SEQUENCES, PROMPT, RECENT, BUDGET = 3, 150, 8, 20
"""Sequences that are drawn; tokens of a prompt, those that stay in the window, and the budget."""


def ragged(batch: int, count: int) -> torch.Tensor:
    """Validity ``[B, n]`` with padding in the last sequence and a hole in the first."""
    valid = torch.ones(batch, count, dtype=torch.bool)
    valid[-1, : count // 2] = False
    valid[0, count // 3 : count // 3 + count // 10] = False
    return valid


def slot_sets(ids: torch.Tensor) -> list[set[int]]:
    """The slots that ``ids [..., k]`` name, a set for each selection; no slot comes twice."""
    selections = [ids_of[ids_of >= 0].tolist() for ids_of in ids.flatten(0, -2)]
    assert all(len(set(slots)) == len(slots) for slots in selections), "a slot twice"
    return [set(slots) for slots in selections]


def slot_sets_of(marks: torch.Tensor) -> list[set[int]]:
    """The slots where ``marks [..., n]`` are True, a set for each row."""
    return [set(row.nonzero().flatten().tolist()) for row in marks.flatten(0, -2)]


def overlap(ids: torch.Tensor, best: torch.Tensor) -> float:
    """Share of the ``ids [..., k]`` that are among the ``best [..., k]``."""
    return float((ids.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean())


def store_of(keys: torch.Tensor) -> PagedStore:
    """A store of ``keys [B, H, n, D]``, which are their own values."""
    store = PagedStore(DeviceMemory(keys.device))
    store.append(TokenBlock(keys, keys, 0))
    return store


class WatchedStore(PagedStore):
    """A store that counts how often all keys are read, and lets nobody read while ``closed``."""

    closed = False
    readings = 0

    def chunks(self, chunk_len: int = 4096, stop: int | None = None) -> RowChunks:
        assert not self.closed, "keys were read from the store"
        return super().chunks(chunk_len, stop)

    def key_chunks(self, chunk_len: int = 4096) -> Iterator[tuple[int, torch.Tensor]]:
        assert not self.closed, "keys were read from the store"
        self.readings += 1
        return super().key_chunks(chunk_len)


def draw(seed: int, count: int, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries ``[B, Hq, n, D]`` and keys ``[B, H, n, D]``, whose spectra fall off at other ends."""
    slope = torch.logspace(0.3, -0.6, dim)
    queries = normal(seed, SEQUENCES, HEADS * GROUP, count, dim) * slope.flip(0)
    return queries, normal(seed + 1, SEQUENCES, HEADS, count, dim) * slope


class IndexRun:
    """An index with its store and all tokens of some ``sequences`` of those that are drawn."""

    def __init__(
        self,
        make: Callable[[], Index],
        sequences: Sequence[int] = (0, 1),
        budget: int = BUDGET,
        dim: int = DIM,
        softcap: float | None = None,
    ) -> None:
        self.make, self.sequences, self.budget = make, list(sequences), budget
        self.softcap = softcap
        self.index: Any = make()
        self.store = WatchedStore(DeviceMemory(torch.device("cpu")))
        self.keys = torch.empty(len(self.sequences), HEADS, 0, dim)
        self.valid = torch.empty(len(self.sequences), 0, dtype=torch.bool)
        self.built = False

    @property
    def scale(self) -> float:
        return 2 / math.sqrt(self.keys.shape[3])

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def see(
        self, queries: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """A pass of new tokens, which stay in the window."""
        real = torch.ones(len(keys), keys.shape[2], dtype=torch.bool) if valid is None else valid
        positions = torch.arange(self.length, self.length + keys.shape[2]).expand(len(keys), -1)
        self.index.on_forward(queries, keys, self.length, valid, positions)
        if keys.shape[2] > 1:
            self.index.on_prompt(queries[:, :, -64:], real[:, -64:])
        self.keys = torch.cat([self.keys, keys], dim=2)
        self.valid = torch.cat([self.valid, real], dim=1)

    def flush(self, count: int) -> None:
        """The oldest ``count`` tokens of the window go cold."""
        cold = slice(len(self.store), len(self.store) + count)
        keys, valid = self.keys[:, :, cold], self.valid[:, cold]
        block = TokenBlock(keys, keys, cold.start, None if valid.all() else valid)
        self.store.append(block)
        self.index.add(block)

    def cool(self, keys: torch.Tensor) -> None:
        """Tokens that were in no pass go cold before those of the window."""
        cold, new = len(self.store), torch.ones(len(keys), keys.shape[2], dtype=torch.bool)
        self.keys = torch.cat([self.keys[:, :, :cold], keys, self.keys[:, :, cold:]], dim=2)
        self.valid = torch.cat([self.valid[:, :cold], new, self.valid[:, cold:]], dim=1)
        self.flush(keys.shape[2])

    def prompt(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
        valid: torch.Tensor | None = None,
        cuts: tuple[int, ...] = (),
        recent: int = RECENT,
    ) -> IndexRun:
        """``tokens`` in passes that end at ``cuts``; all but the ``recent`` ones go cold."""
        queries, keys = (x[self.sequences] for x in tokens or draw(0, PROMPT))
        for start, end in zip((0, *cuts), (*cuts, keys.shape[2]), strict=True):
            mask = None if valid is None else valid[self.sequences, start:end]
            self.see(queries[:, :, start:end], keys[:, :, start:end], mask)
            self.flush(max(0, min(end, keys.shape[2] - recent) - len(self.store)))
        return self

    def cold(self, budget: int | None = None, sinks: int = 0) -> ColdTokens:
        """The cold tokens behind the first ``sinks`` ones."""
        length = len(self.store)
        valid = self.valid[:, :length] & (torch.arange(length) >= sinks)
        budget = min(budget or self.budget, length)
        return cold_tokens(valid, self.scale, budget, self.softcap, self.store)

    def ready(self, budget: int | None = None, sinks: int = 0) -> None:
        """What comes before a search."""
        cold = self.cold(budget, sinks)
        is_ready = self.built and not self.index.is_stale(cold)
        (self.index.before_search if is_ready else self.index.build)(cold)
        self.built = True

    def search(
        self, query: torch.Tensor, budget: int | None = None, sinks: int = 0
    ) -> torch.Tensor:
        """Ids of a query of the newest pass, best first."""
        ids = self.index.search(query, self.cold(budget, sinks))
        self.index.after_search(ids)
        return ids

    def select(
        self, query: torch.Tensor, budget: int | None = None, sinks: int = 0
    ) -> torch.Tensor:
        """The same in order, after what comes before a search."""
        self.ready(budget, sinks)
        return self.search(query, budget, sinks).sort(-1).values

    def recall(self, query: torch.Tensor, budget: int | None = None) -> float:
        """Overlap of what a search finds with the exact top-k."""
        ids = self.search(query, budget)
        return measure_recall(query, ids, self.cold(budget)).overlap

    def step(self, seed: int, count: int = 1, flush: int = 0) -> torch.Tensor:
        """A pass of ``count`` tokens, each of which selects."""
        queries, keys = (x[self.sequences] for x in draw(1000 + 10 * seed, count))
        self.see(queries, keys)
        self.flush(flush)
        return self.select(queries)

    def go_on(self, first: int = 100) -> list[torch.Tensor]:
        """Selections of five passes, with a question that selects nothing in between."""
        ids = [self.step(first + i, 1 + i, flush) for i, flush in enumerate((0, 3, 5))]
        queries, keys = (x[self.sequences] for x in draw(first, 6))
        # The new queries point in directions that none before had.
        self.see(queries.flip(-1), keys)
        return ids + [self.step(first + i, 1, flush) for i, flush in ((3, 1), (4, 7))]

    def fork(self) -> IndexRun:
        twin = object.__new__(IndexRun)
        vars(twin).update(vars(self))
        twin.index, twin.store = self.index.fork(), self.store.fork()
        return twin

    def load(self) -> IndexRun:
        """The same after a way to the disk and back."""
        twin = self.fork()
        twin.index = self.make()
        twin.index.load_state_dict({name: x.clone() for name, x in self.index.state_dict().items()})
        return twin

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens, which are cold."""
        for part in (self.index, self.store):
            part.crop(length)
        self.keys, self.valid = self.keys[:, :, :length], self.valid[:, :length]
        self.built = self.built and length > 0

    def reorder(self, rows: list[int]) -> None:
        order = torch.tensor(rows)
        for part in (self.index, self.store):
            part.reorder(order)
        self.keys, self.valid = self.keys[order], self.valid[order]
        self.sequences = [self.sequences[row] for row in rows]
