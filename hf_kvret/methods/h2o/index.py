"""H2O: the heavy hitters of the attention so far are kept, all other cold tokens are given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index, SearchCost
from hf_kvret.contracts.state import number, part, tensor
from hf_kvret.contracts.token_buffer import TokenBuffer, passed
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.options.declare import OneOf, integer, option
from hf_kvret_kernels.soft_cap import soft_cap_


@dataclass(frozen=True)
class H2OConfig(RetrievalConfig):
    """H2O's options beside those of every retrieval cache.

    Attributes:
        top_k: heavy hitters that each KV head keeps, a count or a share of the cold tokens.
            ``sink`` and ``recent`` come on top.
        observed: only so many of the newest queries count, among those since the last selection
            (for a prompt: among all of its queries). ``None``: all of them. Queries are kept until
            the selection, so a number bounds memory and work on a long prompt.
    """

    learns_from_queries: ClassVar[bool] = True
    evicts_by: ClassVar[frozenset[str]] = frozenset({"top_k", "flush", "max_draft"})

    top_k: int | float | None = 0.2
    rest: Literal["mean"] | None = None
    observed: int | None = option(None, integer(1, "queries"), OneOf(None))

    @classmethod
    def why_not(cls, name: str, value: Any) -> list[str]:
        """No exact answers, and no selection of another layer."""
        if name == "select_every" and value != 1:
            return [
                "h2o keeps tokens for each layer by its own queries, and gives others up; take a "
                "method that retrieves, as 'paris'"
            ]
        if name == "lossless" and value:
            return ["h2o gives tokens up for good; take a method that retrieves, as 'paris'"]
        return []


# Logits that are in memory at once, over batch and heads.
_LOGITS = 1 << 24


class H2OIndex(Index):
    """Keeps for each KV head the tokens with most accumulated attention; the others are evicted.

    Softmax weights of a token are summed over queries and the heads of a group. A query is counted
    once the next pass shows that it was not a rejected draft. When tokens leave the window, they
    compete with the kept tokens for the budget.

    A crop drops the sums of cropped tokens, but not the weights that their queries gave to others.
    Tokens that it moves back to the window keep their sums; evicted ones are attended to there
    again, and are evicted again when they leave it.
    """

    capture_obstacle = "h2o counts the queries of a step before the next one, led by the host"

    # Queries that do not count yet, and keys of tokens that were not cold at the last selection.
    _queries: TokenBuffer = part(lambda: TokenBuffer(64))
    _keys: TokenBuffer = part(lambda: TokenBuffer(64))
    # All tokens have a validity, and a sum of their weights, which is -inf once they are evicted.
    _valid: TokenBuffer = passed(dims="B 1 t", dtype=torch.bool)
    _scores: TokenBuffer = passed(dims="B H t", dtype=torch.float32)
    # The newest of the queries, which may be rejected drafts.
    _tentative: int = number(0, key="counts")
    # Cold tokens and budget of the current selection; after a crop its tokens that are left, and 0.
    _chosen_len: int = number(0, key="counts")
    _chosen_budget: int = number(0, key="counts")
    # Slots of the kept tokens [B, Hkv, k] int32, and of the same and the sinks [B, Hkv, k + s].
    _selection: torch.Tensor | None = tensor(
        key="kept", optional=True, shared=True, dims="B H k", dtype=torch.int32
    )
    _attention_ids: torch.Tensor | None = tensor(
        key="attended", optional=True, shared=True, dims="B H s", dtype=torch.int32
    )

    def __init__(self, options: H2OConfig) -> None:
        self.options = options

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        options, count = self.options, queries.shape[2]
        assert start <= len(self._scores), "every pass is seen, in order"
        # The first pass of all is a prompt, however short.
        self._tentative = count if start and count <= options.max_draft else 0
        self._queries.put(queries, start)
        self._keys.put(keys, start)
        self._scores.put(keys.new_zeros(keys.shape[:3], dtype=torch.float32), start)
        if valid is None:
            valid = torch.ones(len(keys), count, dtype=torch.bool, device=keys.device)
        self._valid.put(valid.unsqueeze(1), start)
        if options.observed is not None:
            self._queries.drop(start + count - options.observed - options.max_draft)

    def add(self, block: TokenBlock) -> None:
        """Nothing: the next selection sees what is cold by then."""

    def build(self, cold: ColdTokens) -> None:
        self.before_search(cold)

    def before_search(self, cold: ColdTokens) -> None:
        """Count the queries before the newest pass; then select, if the tokens changed.

        Not in ``after_search``, where it is unknown whether drafts are accepted, and the store may
        be busy.
        """
        self._count(cold)
        self._keys.drop(len(cold))
        if (self._chosen_len, self._chosen_budget) != (len(cold), cold.budget):
            self._choose(cold)

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        """The kept tokens, the same for every query; -1 if fewer than the budget are left.

        A budget that covers all does not restore evicted tokens.
        """
        selection = self._selection
        assert selection is not None, "before_search comes first"
        valid = cold.valid[:, None].expand(-1, selection.shape[1], -1)
        ids = selection.masked_fill(~valid.gather(2, selection.clamp(min=0).long()), -1)
        return ids[:, :, None].expand(-1, -1, query.shape[2], -1).contiguous()

    def cost(self, n: int, budget: int) -> SearchCost:
        """Ids of the kept tokens, and the keys in the window: queries count against both."""
        nbytes = 0 if self._selection is None else self._selection.nbytes + self._keys.rows.nbytes
        return SearchCost(min(budget, n), nbytes, min(budget + self.options.sink, n))

    def crop(self, length: int) -> None:
        """Drop the selection; what is left of it counts until the next one.

        The start of the next pass shows which later tokens are in the window and which are gone.
        """
        if length < self._chosen_len and self._attention_ids is not None:
            ids = self._attention_ids
            self._attention_ids = ids.masked_fill(ids >= length, -1) if length else None
            self._selection = None
            self._chosen_len, self._chosen_budget = length, 0

    def stats(self) -> dict[str, Any]:
        """``evicted``: tokens that never come back, summed over batch and KV heads."""
        is_empty = not len(self._scores)
        return {"evicted": 0 if is_empty else int((self._scores.rows == float("-inf")).sum())}

    def _count(self, cold: ColdTokens) -> None:
        """Add the weights of all queries except the tentative ones, and drop these queries."""
        end = self._queries.end - self._tentative
        if self.options.observed is not None:
            self._queries.drop(end - self.options.observed)
        ids, keys = self._ids_in_store(cold), self._keys.rows.float()
        logits_len = self._queries.rows[:, :, :1, 0].numel() * (ids.shape[2] + keys.shape[2])
        size = max(1, _LOGITS // max(1, logits_len))
        for start in range(self._queries.first, end, size):
            self._count_queries(start, min(start + size, end), ids, keys, cold)
        self._queries.drop(end)

    def _ids_in_store(self, cold: ColdTokens) -> torch.Tensor:
        """``[B, Hkv, k]`` int32, -1 for none: tokens that count and whose keys are not here.

        They are the kept ones and the sinks. After a crop others may be cold since the last
        selection.
        """
        slots = slice(self._chosen_len, max(self._chosen_len, min(self._keys.first, len(cold))))
        counts = self._counts(slots)
        later = torch.arange(slots.start, slots.stop, dtype=torch.int32, device=counts.device)
        ids = later.expand(counts.shape).masked_fill(~counts, -1)
        return ids if self._attention_ids is None else torch.cat([self._attention_ids, ids], dim=2)

    def _counts(self, slots: slice) -> torch.Tensor:
        """``[B, Hkv, n]``: which tokens are neither padding nor evicted."""
        return self._valid.rows[:, :, slots] & (self._scores.rows[:, :, slots] > float("-inf"))

    def _count_queries(
        self, first: int, last: int, ids: torch.Tensor, keys: torch.Tensor, cold: ColdTokens
    ) -> None:
        """Count the queries of slots ``first .. last``.

        Keys of ``ids [B, Hkv, k]`` are read in the store, ``keys [B, Hkv, n, D]`` fp32 are here.
        """
        start = self._keys.first
        slots = slice(start, max(start, last))
        valid = self._valid.rows[:, 0, first:last]
        # Zeros in place of what must not matter, as it may be NaN.
        queries = self._queries.since(first)[:, :, : last - first]
        queries = queries.masked_fill(~valid[:, None, :, None], 0.0)
        grouped = (queries.float() * cold.scale).reshape(*keys.shape[:2], -1, keys.shape[3])
        logits = grouped @ keys[:, :, : slots.stop - start].mT
        soft_cap_(logits, cold.softcap)
        own = torch.arange(first, last, device=keys.device)[:, None]
        later = torch.arange(start, slots.stop, device=keys.device) > own
        hidden = ~self._counts(slots)[:, :, None, None] | later
        logits = logits.unflatten(2, (-1, last - first)).masked_fill_(hidden, float("-inf"))
        if ids.shape[2]:
            query_ids = ids[:, :, None].expand(-1, -1, last - first, -1).contiguous()
            far = cold.store.scores(queries, query_ids, cold.scale, cold.softcap)
            logits = torch.cat([logits, far.unflatten(1, logits.shape[1:3])], dim=-1)
        weights = logits.softmax(-1).masked_fill_(~valid[:, None, None, :, None], 0.0)
        near, far = weights.sum((2, 3)).split([slots.stop - start, ids.shape[2]], dim=-1)
        scores = self._scores.writable()
        scores[:, :, slots] += near
        scores.scatter_add_(2, ids.long().clamp(min=0), far.masked_fill(ids < 0, 0.0))

    def _choose(self, cold: ColdTokens) -> None:
        """Select the best of the cold tokens, evict the others."""
        scores = self._scores.writable()[:, :, : len(cold)]
        retrievable = cold.valid[:, None]
        best = scores.masked_fill(~retrievable, float("-inf")).topk(cold.budget, dim=-1)
        is_kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best.indices, True)
        scores.masked_fill_(retrievable & ~is_kept, float("-inf"))
        self._selection = best.indices.int().masked_fill(best.values == float("-inf"), -1)
        # Sinks are never evicted, and count beside the kept tokens.
        counting = self._counts(slice(len(cold))).int()
        attended = counting.topk(min(cold.budget + self.options.sink, len(cold)), dim=-1)
        self._attention_ids = attended.indices.int().masked_fill(attended.values == 0, -1)
        self._chosen_len, self._chosen_budget = len(cold), cold.budget


class H2OCache(RetrievalCache):
    """Attends to the ``top_k`` cold tokens with most accumulated attention only (H2O).

    Evicted tokens stay in the store, so eviction itself frees no memory.
    """

    name: ClassVar[str] = "h2o"
    Config: ClassVar[type[RetrievalConfig]] = H2OConfig
    IndexClass: ClassVar[type[Any] | None] = H2OIndex
