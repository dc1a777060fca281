"""CTkvrIndex: the lists of the nearest past queries, then exact scores (CTkvr, section 3.1)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index, SearchCost
from hf_kvret.contracts.state import number, part, transient
from hf_kvret.methods.ctkvr.config import CTkvrConfig
from hf_kvret.methods.ctkvr.inverted_file import MOST_TOKENS, CentroidQueue, Centroids, InvertedFile
from hf_kvret.methods.ctkvr.sampler import CentroidSampler, MixedSampler
from hf_kvret.options.config import RetrievalConfig
from hf_kvret_kernels import centroid
from hf_kvret_kernels.host_step import HostSearch

# Least number of queries between two questions short enough to be drafts: each reads all keys.
_PAUSE = 32


class CTkvrIndex(Index):
    """Past queries as centroids, each with a list of the keys that were best for it.

    A query recalls the lists of the centroids nearest to it, all recalled tokens are scored, and
    the best are selected. Some queries become centroids themselves: at the next flush, with lists
    over all keys, or, as published, at once, with the best of their recalled tokens.
    """

    capture_obstacle = "ctkvr adds queries and their lists on the host at every step"

    _prompt_queries: CentroidSampler | MixedSampler = part(key="pool", may_be_empty=True)
    # Question and step queries have no lists yet; those of steps come after the last flush.
    _question_queries: CentroidSampler = part(CentroidSampler, key="asked", may_be_empty=True)
    _step_queries: CentroidSampler = part(CentroidSampler, key="answered", may_be_empty=True)
    _file: InvertedFile = part(key="lists")
    # KV heads and query heads of each; 0 before the first pass.
    _heads: int = number(0, key="counts")
    _group: int = number(0, key="counts")
    _length: int = number(0, key="counts")
    _steps: int = number(0, key="counts")
    _flushed: bool = number(False, key="counts")
    _queries_since_question: float = number(math.inf, key="counts")
    # Which queries of this pass become centroids at once, their slots [B, q], and what they chose.
    _columns: list[int] | None = transient()
    _slots: torch.Tensor | None = transient()
    # Queries [B, H, Q, G, D], the best [B, H, Q, width] of their recalled tokens, and cold tokens.
    _selection: tuple[torch.Tensor, torch.Tensor, int] | None = transient()

    def __init__(self, options: CTkvrConfig) -> None:
        self.options = options
        self._prompt_queries = MixedSampler() if options.choice == "mixed" else CentroidSampler()
        self._file = InvertedFile(options)

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        options, count = self.options, queries.shape[2]
        after_pause = self._queries_since_question >= _PAUSE
        self._heads, self._group = keys.shape[1], queries.shape[1] // keys.shape[1]
        self._columns = self._slots = None
        if self._file.queue is None:
            # Few while the cache is short, so that copies are small.
            most = options.centroids_for(start + count)
            self._prompt_queries.add(queries, start, valid, most)
        elif options.questions and count > 1 and (count > options.max_draft or after_pause):
            self._question_queries.add(queries, start, valid, options.centroids)
            self._queries_since_question = 0.0
        elif options.update and count <= options.max_draft:
            self._take_steps(queries, start, valid)
        self._queries_since_question += count

    def add(self, block: TokenBlock) -> None:
        if block.end > MOST_TOKENS:
            raise ValueError(
                f"{block.end} cold tokens: the lists of ctkvr name {MOST_TOKENS} tokens at most; "
                "for longer texts use cache_implementation='paris' or 'lrqk'"
            )
        self._length = block.end
        self._flushed = True

    def build(self, cold: ColdTokens) -> None:
        self.before_search(cold)

    def before_search(self, cold: ColdTokens) -> None:
        """Make the lists that are due, which reads all keys.

        The first lists are made when the budget no longer covers all tokens.
        """
        file, options = self._file, self.options
        if file.queue is None:
            if cold.budget >= len(cold):
                return
            most = options.centroids_for(len(cold))
            file.list_all(cold, self._centroids(self._prompt_queries, most))
            self._prompt_queries.reset()
            self._flushed = False
        # Even a long question replaces at most half of the centroids.
        most = max(1, options.centroids_for(len(cold)) // 2)
        samplers = [self._step_queries] * self._flushed + [self._question_queries]
        samplers = [sampler for sampler in samplers if len(sampler)]
        new = [self._centroids(sampler, most) for sampler in samplers]
        for sampler in samplers:
            sampler.reset()
        file.keep_up(cold, new)
        self._flushed = False

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        """See ``Index.search``; fewer tokens than the budget if the recalled lists have fewer."""
        length = len(cold)
        if cold.budget >= length:
            ids = torch.arange(length, dtype=torch.int32, device=query.device)
            ids = ids.expand(len(query), length).masked_fill(~cold.valid, -1)
            return ids[:, None, None].expand(-1, self._heads, query.shape[2], -1).contiguous()
        queue = self._file.queue
        assert queue is not None, "build, or before_search, has made lists for this budget"
        ids = self._recalled(queue, query, cold)
        if self._columns:
            # Lists of queries that become centroids at once may be longer than the budget.
            best = cold.store.best(query, ids, queue.width, cold.scale, cold.softcap)
            self._selection = self._grouped(query), best, length
        return cold.store.best(query, ids, cold.budget, cold.scale, cold.softcap)

    def _recalled(
        self, queue: CentroidQueue, query: torch.Tensor, cold: ColdTokens
    ) -> torch.Tensor:
        """Ids ``[B, H, Q, M]`` int32, each valid one at its first occurrence; else -1.

        For ``query [B, Hq, Q, D]``: see ``CentroidQueue.recall``, and then the tokens that are in
        no list yet.
        """
        ids = queue.recall(self._grouped(query), self.options)
        end = len(cold)
        start = end - self._file.pending(end)
        newest = torch.arange(end - 1, start - 1, -1, dtype=torch.int32, device=query.device)
        ids = torch.cat([ids, newest.expand(*ids.shape[:3], -1)], dim=3)
        return centroid.unite(ids, cold.valid)

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> HostSearch | None:
        """See ``Index.host_search``.

        Not where all tokens are selected, nor where queries of this pass become centroids at once.
        """
        queue = self._file.queue
        if cold.budget >= len(cold) or self._columns or queue is None:
            return None
        return queue.host_search(query, self.options, self._file.pending(len(cold)))

    # Tensors kept here must be writable outside inference mode: see LayerKV.
    @torch.inference_mode(False)
    def after_search(self, ids: torch.Tensor) -> None:
        """Make queries of this pass centroids, with the best of their recalled tokens."""
        selection, columns, slots = self._selection, self._columns, self._slots
        self._selection = self._columns = self._slots = None
        queue = self._file.queue
        if selection is None or columns is None or slots is None or queue is None:
            return
        queries, best, length = selection
        if queries.shape[2] > columns[-1]:
            queue.push(Centroids(queries[:, :, columns], slots), (best[:, :, columns],), length)

    def cost(self, n: int, budget: int) -> SearchCost:
        """All centroids, the recalled lists, and the bytes that scoring their tokens reads."""
        queue, nprobe = self._file.queue, self.options.nprobe
        nbytes = 0 if queue is None else queue.recall_nbytes(nprobe)
        if budget >= n or queue is None:
            return SearchCost(n, nbytes)
        following = self.options.following
        list_len = queue.width + min(queue.width, following) * following
        candidates = min(n, nprobe * list_len + self._file.pending(n))
        return SearchCost(candidates, nbytes, keys_read=candidates)

    def crop(self, length: int) -> None:
        """As for every state; a crop to 0 also forgets the queries."""
        if length == 0:
            self.reset()
        if length >= self._length:
            return
        self._length = length
        super().crop(length)

    def set_options(self, options: Any) -> None:
        super().set_options(options)
        self._file.options = options

    def stats(self) -> dict[str, Any]:
        """Statistics of the lists; counts since the index was made or forked.

        ``centroids``: current number. ``list_builds``: how often lists over all keys were made, and
        ``keys_scored``: keys read from the store for them, over batch and KV heads.
        ``pending_tokens``: tokens in no list yet.
        """
        return {**self._file.stats(), "pending_tokens": self._length - self._file.listed_len}

    def _take_steps(self, queries: torch.Tensor, start: int, valid: torch.Tensor | None) -> None:
        """Remember queries that become centroids, at the next flush or after this search."""
        options, count = self.options, queries.shape[2]
        before, self._steps = self._steps, self._steps + count
        columns = [i for i in range(count) if (before + i + 1) % options.update == 0]
        if options.update_lists == "all":
            for i in columns:
                column_valid = None if valid is None else valid[:, i : i + 1]
                query = queries[:, :, i : i + 1]
                self._step_queries.add(query, start + i, column_valid, options.centroids)
        elif columns:
            slots = torch.tensor([start + i for i in columns], device=queries.device)
            slots = slots.expand(len(queries), -1)
            if valid is not None:
                slots = slots.masked_fill(~valid[:, columns], -1)
            self._columns, self._slots = columns, slots

    def _centroids(self, sampler: CentroidSampler | MixedSampler, count: int) -> Centroids:
        """At most ``count`` of the sampled queries."""
        queries, slots = sampler.best(count)
        return Centroids(self._grouped(queries), slots)

    def _grouped(self, queries: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, G, D]`` of ``queries [B, Hq, Q, D]``."""
        return queries.unflatten(1, (self._heads, self._group)).transpose(2, 3)


class CTkvrCache(RetrievalCache):
    """Attends to the best tokens in the lists of the past queries nearest to a query (CTkvr)."""

    name: ClassVar[str] = "ctkvr"
    Config: ClassVar[type[RetrievalConfig]] = CTkvrConfig
    IndexClass: ClassVar[type[Any] | None] = CTkvrIndex
