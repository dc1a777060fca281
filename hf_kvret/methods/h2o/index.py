"""H2O: the heavy hitters of the attention so far are kept, all other cold tokens are given up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index, SearchCost
from hf_kvret.contracts.state import number, part, tensor
from hf_kvret.contracts.token_buffer import TokenBuffer, passed
from hf_kvret.options.config import RetrievalConfig, check_int, check_number
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

    top_k: int | float | None = 0.2
    observed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observed is not None:
            check_int("observed", self.observed, 1, "queries, or None for all")

    @classmethod
    def for_prompt(cls, prompt_len: int, share: float = 0.2, **changes: Any) -> Self:
        """The published protocol: ``share`` of a prompt, half heavy hitters and half recent tokens.

        Both counts stay while text is generated, a token is evicted at every step, nothing else is
        protected. Each half is at least one token; ``changes`` are other options. ValueError for a
        ``share`` that is not above 0 and at most 1, or for a prompt without tokens.
        """
        check_int("prompt_len", prompt_len, 1, "tokens")
        meaning = "the part that is kept, above 0 and at most 1"
        check_number("share", share, lambda x: 0.0 < x <= 1.0, meaning)
        half = max(1, int(share / 2 * prompt_len))
        published = {"top_k": half, "recent": half, "sink": 0, "flush": 1, "dense_below": 0}
        return cls.from_options(**{**published, **changes})


# Logits that are in memory at once, over batch and heads; on a CPU they pass through its cache.
_LOGITS = 1 << 24
_LOGITS_CPU = 1 << 20
# Keys of the store that are compared with queries at once.
_CHUNK_LEN = 4096


class H2OIndex(Index):
    """Keeps for each KV head the tokens with most accumulated attention; the others are evicted.

    Softmax weights of a token are summed over queries and the heads of a group. A query is counted
    once the next pass shows that it was not a rejected draft. When tokens leave the window, they
    compete with the kept tokens for the budget.

    A crop drops the sums of cropped tokens, but not the weights that their queries gave to others.
    Tokens that it moves back to the window keep their sums; evicted ones are attended to there
    again, and are evicted again when they leave it.
    """

    capture_obstacle = (
        "h2o keeps queries on the host at every step, and counts them before the next"
    )

    # Queries that do not count yet, and keys of tokens that are not cold.
    _queries: TokenBuffer = part(lambda: TokenBuffer(64, dims="B Q n D"))
    _keys: TokenBuffer = part(lambda: TokenBuffer(64, dims="B H n D"))
    # All tokens have a validity, and a sum of their weights, which is -inf once they are evicted.
    _valid: TokenBuffer = passed(dims="B 1 t", dtype=torch.bool)
    _scores: TokenBuffer = passed(dims="B H t", dtype=torch.float32)
    # The newest of the queries, which may be rejected drafts.
    _tentative: int = number(0, key="counts")
    # Cold tokens and budget of the current selection.
    _chosen_len: int = number(0, key="counts")
    _chosen_budget: int = number(0, key="counts")
    # The kept tokens' slots [B, Hkv, k] int32, and the same after the sinks' [B, Hkv, s + k].
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
        if start > len(self._scores):
            raise RuntimeError(
                f"tokens start at slot {start}, but only {len(self._scores)} were seen: call "
                "on_forward for every pass, in order, or load the index with its state"
            )
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
        """Drop keys of cold tokens; not while few queries are uncounted, which need these keys."""
        if not self._are_few(len(self._queries)):
            self._keys.drop(block.end)

    def build(self, cold: ColdTokens) -> None:
        self.before_search(cold)

    def before_search(self, cold: ColdTokens) -> None:
        """Count the queries before the newest pass; then select, if the tokens changed.

        Not in ``after_search``, where it is unknown whether drafts are accepted, and the store may
        be busy.
        """
        self._count(cold)
        self._keys.drop(len(cold))
        if not self._is_chosen(cold):
            self._choose(cold)

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        """The kept tokens, the same for every query; -1 if fewer than the budget are left.

        A budget that covers all does not restore evicted tokens. RuntimeError for other tokens or
        another budget than in the last ``build`` or ``before_search``.
        """
        selection = self._selection
        if selection is None or not self._is_chosen(cold):
            raise RuntimeError(
                f"nothing is chosen for {len(cold)} tokens and a budget of {cold.budget}: call "
                "on_forward, add and build, or before_search, first"
            )
        valid = cold.valid[:, None].expand(-1, selection.shape[1], -1)
        ids = selection.masked_fill(~valid.gather(2, selection.clamp(min=0).long()), -1)
        return ids[:, :, None].expand(-1, -1, query.shape[2], -1).contiguous()

    def cost(self, n: int, budget: int) -> SearchCost:
        """Ids of the kept tokens, and the keys in the window, which queries are compared with.

        Every query is compared with the kept keys once more, to be counted.
        """
        nbytes = 0 if self._selection is None else self._selection.nbytes + self._keys.rows.nbytes
        return SearchCost(min(budget, n), nbytes, min(budget + self.options.sink, n))

    def crop(self, length: int) -> None:
        """Drop the selection; the next one is among the first ``length`` tokens.

        The start of the next pass shows which later tokens are in the window and which are gone.
        """
        if length < self._chosen_len:
            self._selection = self._attention_ids = None
            self._chosen_len = self._chosen_budget = 0

    def stats(self) -> dict[str, Any]:
        """``evicted``: tokens that never come back, summed over batch and KV heads."""
        if not len(self._scores):
            return {"evicted": 0}
        return {"evicted": int((self._scores.rows == float("-inf")).sum())}

    def loaded(self) -> None:
        """KeyError where what was chosen is missing."""
        if not self._chosen_len:
            self._selection = self._attention_ids = None
            return
        for name, ids in (("kept", self._selection), ("attended", self._attention_ids)):
            if ids is None:
                raise KeyError(name)

    def _is_chosen(self, cold: ColdTokens) -> bool:
        chosen = self._chosen_len, self._chosen_budget
        return self._selection is not None and chosen == (len(cold), cold.budget)

    def _are_few(self, queries: int) -> bool:
        """Whether ``queries`` are few (two short passes), so scored against kept tokens only."""
        return self._selection is not None and queries <= 2 * self.options.max_draft

    def _count(self, cold: ColdTokens) -> None:
        """Add the weights of all queries except the tentative ones, and drop these queries."""
        end = self._queries.end - self._tentative
        if self.options.observed is not None:
            self._queries.drop(end - self.options.observed)
        count = end - self._queries.first
        if count <= 0:
            return
        # Tokens between the last selection and the keys at hand must be read from the store. After
        # a crop there is a gap, too, but of tokens that are not cold: nothing to read.
        near = self._keys.first <= self._chosen_len or self._chosen_len == len(cold)
        count_weights = self._count_few if near and self._are_few(count) else self._count_many
        valid = self._valid.rows[:, 0, self._queries.first : end]
        count_weights(self._queries.rows[:, :, :count], self._queries.first, valid, cold)
        self._queries.drop(end)

    def _count_few(
        self, queries: torch.Tensor, first: int, valid: torch.Tensor, cold: ColdTokens
    ) -> None:
        """As ``_count_many`` at once, for the selected tokens and those with keys at hand."""
        ids, start = self._attention_ids, self._keys.first
        assert ids is not None
        query_ids = ids[:, :, None].expand(-1, -1, valid.shape[1], -1).contiguous()
        far = cold.store.scores(queries, query_ids, cold.scale, cold.softcap)
        near = self._logits(queries, first, self._keys.rows, start, cold)
        weights = torch.cat([far.unflatten(1, near.shape[1:3]), near], dim=-1).softmax(-1)
        sums = weights.masked_fill_(~valid[:, None, None, :, None], 0.0).sum((2, 3))
        far_sums = sums[..., : ids.shape[2]].masked_fill(ids < 0, 0.0)
        scores = self._scores.writable()
        scores.scatter_add_(2, ids.long().clamp(min=0), far_sums)
        scores[:, :, start : start + near.shape[4]] += sums[..., ids.shape[2] :]

    def _count_many(
        self, queries: torch.Tensor, first: int, valid: torch.Tensor, cold: ColdTokens
    ) -> None:
        """Add the weights of causal attention over all keys, which are read twice.

        ``queries [B, Hq, q, D]`` are of the slots from ``first`` on; those that are not
        ``valid [B, q]``, or see no key, give nothing.
        """
        # Zeros in place of what must not matter, as it may be NaN.
        queries = queries.masked_fill(~valid[:, None, :, None], 0.0)
        batch, query_heads, count, _ = queries.shape
        heads = self._scores.rows.shape[1]
        shape = batch, heads, query_heads // heads, count
        lse = queries.new_full(shape, float("-inf"), dtype=torch.float32)
        for start, keys in self._key_chunks(cold):
            for block, logits in self._blocks(queries, first, keys, start, cold):
                lse[..., block] = torch.logaddexp(lse[..., block], logits.logsumexp(-1))
        lse = lse.masked_fill(~valid[:, None, None] | (lse == float("-inf")), float("inf"))
        for start, keys in self._key_chunks(cold):
            sums = lse.new_zeros(keys.shape[:3])
            for block, logits in self._blocks(queries, first, keys, start, cold):
                sums += logits.sub_(lse[..., block].unsqueeze(-1)).exp_().sum((2, 3))
            self._scores.writable()[:, :, start : start + sums.shape[2]] += sums

    def _key_chunks(self, cold: ColdTokens) -> Iterator[tuple[int, torch.Tensor]]:
        """All keys with their first slot: cold ones from the store, then those in the window."""
        for start, keys in cold.store.key_chunks(_CHUNK_LEN):
            yield start, keys.to(self._keys.rows.device)
        start = max(self._keys.first, len(cold))
        keys = self._keys.since(start)
        if keys.shape[2]:
            yield start, keys

    def _blocks(
        self, queries: torch.Tensor, first: int, keys: torch.Tensor, start: int, cold: ColdTokens
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """``_logits`` of some queries after the others, and where these are among all."""
        most = _LOGITS_CPU if keys.is_cpu else _LOGITS
        size = max(1, most // (queries[:, :, 0, 0].numel() * max(1, keys.shape[2])))
        for begin in range(0, queries.shape[2], size):
            block = slice(begin, min(begin + size, queries.shape[2]))
            if first + block.stop > start:
                yield block, self._logits(queries[:, :, block], first + begin, keys, start, cold)

    def _logits(
        self, queries: torch.Tensor, first: int, keys: torch.Tensor, start: int, cold: ColdTokens
    ) -> torch.Tensor:
        """Attention logits ``[B, Hkv, G, q, n]`` fp32; -inf where a query does not see a key.

        ``queries [B, Hq, q, D]`` are of the slots from ``first`` on, ``keys [B, Hkv, n, D]`` of
        those from ``start`` on. Evicted keys are not seen.
        """
        heads, span = keys.shape[1], slice(start, start + keys.shape[2])
        grouped = (queries.float() * cold.scale).reshape(len(keys), heads, -1, keys.shape[3])
        logits = grouped @ keys.float().transpose(-1, -2)
        soft_cap_(logits, cold.softcap)
        alive = self._valid.rows[:, :, span] & (self._scores.rows[:, :, span] > float("-inf"))
        slots = torch.arange(start, span.stop, device=keys.device)
        own = torch.arange(first, first + queries.shape[2], device=keys.device)
        hidden = ~alive[:, :, None, None] | (slots > own[:, None])
        return logits.unflatten(2, (-1, len(own))).masked_fill_(hidden, float("-inf"))

    def _choose(self, cold: ColdTokens) -> None:
        """Select the best of the cold tokens, evict the others."""
        scores = self._scores.rows[:, :, : len(cold)]
        retrievable = cold.valid[:, None]
        best = scores.masked_fill(~retrievable, float("-inf")).topk(cold.budget, dim=-1)
        absent = best.values == float("-inf")
        marks = retrievable.new_zeros(*scores.shape[:2], len(cold) + 1)
        marks.scatter_(2, best.indices.masked_fill(absent, len(cold)), True)
        evicted = retrievable & ~marks[..., : len(cold)]
        self._scores.writable()[:, :, : len(cold)].masked_fill_(evicted, float("-inf"))
        self._selection = best.indices.int().masked_fill(absent, -1)
        self._attention_ids = torch.cat([self._sinks(len(cold)), self._selection], dim=2)
        self._chosen_len, self._chosen_budget = len(cold), cold.budget

    def _sinks(self, cold_len: int) -> torch.Tensor:
        """``[B, Hkv, s]`` int32: the first valid cold tokens of each sequence, -1 for none."""
        valid = self._valid.rows[:, :, :cold_len]
        first = valid & (valid.cumsum(-1) <= self.options.sink)
        slots = torch.arange(cold_len, dtype=torch.int32, device=valid.device)
        slots = slots.expand(valid.shape).masked_fill(~first, cold_len)
        sinks = slots.topk(min(self.options.sink, cold_len), largest=False).values
        sinks = sinks.masked_fill(sinks == cold_len, -1)
        return sinks.expand(-1, self._scores.rows.shape[1], -1)


class H2OCache(RetrievalCache):
    """Attends to the ``top_k`` cold tokens with most accumulated attention only (H2O).

    Evicted tokens stay in the store, so eviction itself frees no memory.
    """

    name: ClassVar[str] = "h2o"
    Config: ClassVar[type[RetrievalConfig]] = H2OConfig

    @classmethod
    def make_index(cls, options: Any, layer: int) -> H2OIndex:
        """A new, empty index; the same for every layer."""
        return H2OIndex(options)
