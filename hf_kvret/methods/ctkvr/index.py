"""CTkvrIndex: the lists of the nearest past queries, then exact scores (CTkvr, section 3.1)."""

from __future__ import annotations

import math
from typing import Any, Self

import torch

from hf_kvret.block import TokenBlock
from hf_kvret.index import Index
from hf_kvret.methods.ctkvr.codes import KeyCodes
from hf_kvret.methods.ctkvr.config import CTkvrConfig
from hf_kvret.methods.ctkvr.pool import QueryPool
from hf_kvret.methods.ctkvr.queue import CentroidQueue
from hf_kvret.methods.ctkvr.recalled import Recalled
from hf_kvret.methods.ctkvr.upkeep import ColdKeys, share_listed
from hf_kvret.stores import Store

# Queries between two questions that are short enough to be drafts: each reads all keys.
_PAUSE = 32


class CTkvrIndex(Index):
    """Past queries as centroids, each with a list of the keys that were best for it.

    A query recalls the lists of the centroids nearest to it, all recalled tokens are compared, and
    the best are selected. The query becomes a centroid itself, with the best of what it recalled.
    All that needs the validity of tokens or the scale, which only a selection is told, is done at
    the start of a selection: also the lists of the prompt, before the first one that leaves
    tokens out.
    """

    def __init__(self, options: CTkvrConfig) -> None:
        self.options = options
        self._pool = QueryPool(options.choice, options.centroids, options.seed)
        # Queries of a question that have no lists yet.
        self._asked = QueryPool("last", options.centroids)
        self._queue: CentroidQueue | None = None
        self._codes = KeyCodes(options.seed) if options.rerank == "codes" else None
        self._store: Store | None = None
        self._shape: tuple[int, int] | None = None
        # Slots [B, q] of the pass whose queries may become centroids, -1 for padding.
        self._passed: torch.Tensor | None = None
        self._covered: torch.Tensor | None = None
        self._held = self._listed = self._steps = 0
        self._flushed = False
        self._since = math.inf
        self._list_builds = self._keys_scored = 0

    def watch(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
    ) -> None:
        options, count = self.options, queries.shape[2]
        rested = self._since >= _PAUSE
        self._shape = (keys.shape[1], queries.shape[1] // keys.shape[1])
        slots = torch.arange(start, start + count, device=queries.device)
        slots = slots.expand(len(queries), count)
        self._passed = slots if valid is None else slots.masked_fill(~valid, -1)
        if self._queue is None:
            if options.choice == "last":
                self._pool.most = options.centroids_for(start + count)
            self._pool.add(queries, start, valid)
            self._passed = None
        elif options.questions and count > 1 and (count > options.max_draft or rested):
            self._asked.add(queries, start, valid)
            self._passed, self._since = None, 0
        self._since += count

    def observe(self, block: TokenBlock) -> None:
        self._held = block.end
        self._flushed = True
        if self._codes is not None:
            self._codes.append(block)

    def build(self, store: Store) -> None:
        self._store = store

    def refresh(self, store: Store) -> None:
        self._store = store

    # What is kept from a selection must be writable later: see Regions.
    @torch.inference_mode(False)
    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """As the contract says; fewer than ``budget`` where the recalled lists hold fewer.

        RuntimeError before ``watch`` and ``build``.
        """
        if self._store is None or self._shape is None:
            raise RuntimeError("the index is not ready: call watch, observe and build first")
        held, (heads, group) = valid.shape[1], self._shape
        bundles = query.unflatten(1, (heads, group)).transpose(2, 3)
        if budget >= held:
            every = torch.arange(held, dtype=torch.int32, device=query.device)
            every = every.expand(len(query), held).masked_fill(~valid, -1)
            return every[:, None, None].expand(-1, heads, query.shape[2], -1).contiguous()
        self._keep_up(ColdKeys(self._store, valid, scale, softcap), budget)
        assert self._queue is not None
        pending = held - min(held, self._listed) if self.options.pending else 0
        recalled = Recalled.of(self._queue, bundles, self.options, pending, valid)
        wanted = max(budget, self._queue.width)
        if self._codes is not None:
            best = recalled.best_by_codes(self._codes, bundles, wanted, scale, softcap)
        elif self.options.rerank == "exact":
            best = recalled.best_by_keys(self._store, bundles, wanted, scale, softcap)
        else:
            best = recalled.best_by_place(wanted)
        self._learn(bundles, best, held)
        return best[..., :budget].contiguous()

    def candidates(self, cold_len: int, budget: int) -> int:
        if budget >= cold_len or self._queue is None:
            return cold_len
        pending = cold_len - min(cold_len, self._listed) if self.options.pending else 0
        return min(cold_len, self.options.probes * self._queue.width + pending)

    def reorder(self, rows: torch.Tensor) -> None:
        for part in (self._pool, self._asked, self._queue, self._codes):
            if part is not None:
                part.reorder(rows)
        if self._covered is not None:
            self._covered = self._covered.index_select(0, rows)
        self._passed = None

    def crop(self, cold_len: int) -> None:
        if cold_len == 0:
            vars(self).update(vars(type(self)(self.options)))
        if cold_len >= self._held:
            return
        self._held, self._listed = cold_len, min(self._listed, cold_len)
        if self._queue is not None:
            self._queue.crop(cold_len)
        if self._codes is not None:
            self._codes.crop(cold_len)

    def fork(self) -> Self:
        twin = type(self)(self.options)
        shared = ("_shape", "_passed", "_covered", "_held", "_listed", "_steps", "_flushed")
        vars(twin).update({name: vars(self)[name] for name in (*shared, "_since")})
        twin._pool, twin._asked = self._pool.fork(), self._asked.fork()
        twin._queue = None if self._queue is None else self._queue.fork()
        twin._codes = None if self._codes is None else self._codes.fork()
        return twin

    def nbytes(self) -> int:
        parts = (self._pool, self._asked, self._queue, self._codes)
        small = 0 if self._covered is None else self._covered.nbytes
        return small + sum(part.nbytes() for part in parts if part is not None)

    def select_nbytes(self) -> int:
        """Keys that a rerank reads from the store are not among them."""
        if self._queue is None:
            return 0
        recalled = self.candidates(self._held, 0)
        codes = 0.0 if self._codes is None else recalled * self._codes.token_nbytes()
        return self._queue.recall_nbytes(self.options.probes) + int(codes)

    def stats(self) -> dict[str, Any]:
        """What became of the lists since the index was made or forked.

        ``centroids``: that count now. ``list_builds``: how often lists over all keys were made,
        and ``keys_scored``: keys read from the store for it, over batch and KV heads.
        ``pending_tokens``: in no list yet. ``coverage``: share of the cold tokens that was in any
        list when it was last looked at.
        """
        return {
            "centroids": 0 if self._queue is None else len(self._queue),
            "list_builds": self._list_builds,
            "keys_scored": self._keys_scored,
            "pending_tokens": self._held - self._listed,
            "coverage": None if self._covered is None else float(self._covered.mean()),
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self._shape is None:
            return {}
        parts = {"pool": self._pool, "asked": self._asked, "codes": self._codes}
        found = {name: part.state_dict() for name, part in parts.items() if part is not None}
        if self._queue is not None:
            found["queue"] = self._queue.state_dict()
        state = {f"{part}.{name}": x for part, mine in found.items() for name, x in mine.items()}
        counts = [*self._shape, self._held, self._listed, self._steps, self._flushed, self._since]
        state["counts"] = torch.tensor(counts, dtype=torch.float64)
        return state if self._covered is None else {**state, "covered": self._covered}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        def part(prefix: str) -> dict[str, torch.Tensor]:
            return {
                name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)
            }

        *counts, self._since = state["counts"].tolist()
        heads, group, self._held, self._listed, self._steps, flushed = map(int, counts)
        self._shape, self._flushed = (heads, group), bool(flushed)
        for name, pool in (("pool.", self._pool), ("asked.", self._asked)):
            if part(name):
                pool.load_state_dict(part(name))
        if self._codes is not None and self._held:
            self._codes.load_state_dict(part("codes."))
        if part("queue."):
            self._queue = CentroidQueue.from_state(part("queue."))
        self._covered = state.get("covered")

    def _learn(self, bundles: torch.Tensor, best: torch.Tensor, held: int) -> None:
        """Let the queries of this pass be centroids, with the best of what they recalled."""
        passed, count, every = self._passed, bundles.shape[2], self.options.update
        if not every or passed is None or passed.shape[1] != count or self._queue is None:
            return
        before, self._steps = self._steps, self._steps + count
        if self._steps // every > before // every:
            self._queue.push(bundles, passed, best[..., : self._queue.width], held)
        self._passed = None

    def _keep_up(self, cold: ColdKeys, budget: int) -> None:
        """Make the lists that are due, reading all keys for it.

        Waits for the device only after a flush.
        """
        options = self.options
        if self._queue is None:
            chosen = self._bundled(self._pool.best(options.centroids_for(cold.held)))
            self._pool = QueryPool(options.choice, options.centroids)
            self._list_all(cold, *chosen, budget, causal=options.causal)
        assert self._queue is not None
        if len(self._asked):
            queries, slots = self._bundled(self._asked.best(self._queue.room))
            made = self._lists(cold, queries, slots, self._queue.width)
            self._queue.push(queries, slots, made, cold.held)
            self._asked = QueryPool("last", options.centroids)
        if options.pending and cold.held - self._listed > options.pending:
            self._list_all(cold, *self._queue.live(), budget)
        elif self._flushed and self._covered is not None:
            self._list_where_coverage_fell(cold, self._queue)
        self._flushed = False

    def _list_all(
        self,
        cold: ColdKeys,
        queries: torch.Tensor,
        slots: torch.Tensor,
        budget: int,
        causal: bool = False,
    ) -> None:
        """Start the queue anew with these centroids; no token is pending then."""
        width = self.options.list_len(cold.held, budget)
        made = self._lists(cold, queries, slots, width, causal)
        self._queue = CentroidQueue(self.options.centroids_for(cold.held), width)
        self._queue.push(queries, slots, made, cold.held)
        self._listed, self._flushed = cold.held, False
        if self.options.coverage > 0:
            self._covered = share_listed(self._queue, cold.valid, self._listed)

    def _list_where_coverage_fell(self, cold: ColdKeys, queue: CentroidQueue) -> None:
        """Make new lists for the batch rows whose lists hold too few of the tokens."""
        assert self._covered is not None
        found = share_listed(queue, cold.valid, self._listed)
        low = found < self.options.coverage * self._covered
        if not bool(low.any()):
            return
        queries, slots = queue.live()
        made = self._lists(cold, queries, slots, queue.width)
        # What is next to a row in a batch must not change it.
        kept = torch.cat(list(queue.pieces()), dim=2)
        self._queue = CentroidQueue(queue.room, queue.width)
        made = torch.where(low[:, None, None, None], made, kept)
        self._queue.push(queries, slots, made, cold.held)
        # Not to be asked about again before it is lower still.
        found = share_listed(self._queue, cold.valid, self._listed)
        self._covered = torch.where(low, found, self._covered)

    def _lists(
        self,
        cold: ColdKeys,
        queries: torch.Tensor,
        slots: torch.Tensor,
        width: int,
        causal: bool = False,
    ) -> torch.Tensor:
        self._list_builds += 1
        self._keys_scored += len(queries) * queries.shape[1] * cold.held
        return cold.lists(queries, slots, width, causal=causal)

    def _bundled(
        self, chosen: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, H, m, G, D]`` of ``[B, Hq, m, D]``, and the slots as they are."""
        assert self._shape is not None
        return chosen[0].unflatten(1, self._shape).transpose(2, 3), chosen[1]
