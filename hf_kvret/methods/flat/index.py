"""Exact top-k retrieval: the reference for all other methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import CapturableIndex, ColdTokens, Index, SearchCost
from hf_kvret.contracts.token_buffer import TokenBuffer, tokens
from hf_kvret.observe.recall import exact_scores
from hf_kvret.options.config import RetrievalConfig
from hf_kvret_kernels import proxy
from hf_kvret_kernels.host_step import FlatSearch, HostSearch
from hf_kvret_kernels.relevance import top_indices


@dataclass(frozen=True)
class FlatConfig(RetrievalConfig):
    """The oracle has no options of its own."""


class FlatIndex(CapturableIndex, Index):
    """Keeps a copy of the keys on the device. One selection serves a KV head's query heads.

    The relevance of a token is its largest softmax weight over the query heads of the group; ties
    are broken arbitrarily. Keys of up to 256 elements are their own proxies: one kernel reads them
    as they are, and sums are fp32.
    """

    _keys: TokenBuffer = tokens(dims="B H N D")

    def add(self, block: TokenBlock) -> None:
        self._keys.append(block.keys)

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        keys, budget = self._keys.rows, cold.budget
        if keys.shape[3] <= proxy.MOST_RANK:
            return proxy.top_indices(query, keys, keys.shape[1], budget, **cold.scoring._asdict())
        scores = exact_scores(query, keys, cold.scale, cold.softcap)
        scores = scores.masked_fill(~cold.valid[:, None, None], float("-inf"))
        return top_indices(scores, keys.shape[1], budget)

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> HostSearch:
        return FlatSearch(self._keys.rows)

    def cost(self, n: int, budget: int) -> SearchCost:
        """All keys, once."""
        return SearchCost(n, self._keys.rows_nbytes)


class FlatKVCache(RetrievalCache):
    """Attends to the exact top-k of the cold tokens: the reference for all other methods."""

    name: ClassVar[str] = "flat"
    Config: ClassVar[type[RetrievalConfig]] = FlatConfig

    @classmethod
    def make_index(cls, options: RetrievalConfig, layer: int) -> FlatIndex:
        """A new, empty index; the same for every layer."""
        return FlatIndex()
