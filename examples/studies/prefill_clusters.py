"""Clusters learnt from the prompt's keys: the opponent of ParisKV's drift comparison.

The kind of index that ParisKV's figures 1 and 10 measure themselves against: its centroids fit the
keys they were learnt from, and keys that are generated later join the nearest of them. What it
picks is reranked with exact scores, which no method with compact codes can do better. For study
only: it keeps all keys on the device, serves one row without padding, and is never saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.config import RetrievalConfig
from hf_kvret.core.block import TokenBlock
from hf_kvret.core.index import ColdTokens, SearchCost
from hf_kvret.core.recall import exact_scores
from hf_kvret.core.state import tensor
from hf_kvret.core.token_buffer import TokenBuffer, tokens
from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret_kernels.relevance import group_relevance

_ROUNDS = 10


@dataclass(frozen=True)
class ClusterConfig(RetrievalConfig):
    """Clusters of each KV head, at most one a key; share of cold tokens that is scored exactly."""

    clusters: int = 256
    candidate_ratio: float = 0.1


class PrefillClusterIndex(FlatIndex):
    """k-means over each KV head's prompt keys; probes clusters, the most promising first."""

    _cluster: TokenBuffer = tokens()
    _centroids: torch.Tensor | None = tensor(shared=True)

    def __init__(self, options: ClusterConfig) -> None:
        self.options = options

    def add(self, block: TokenBlock) -> None:
        if block.valid is not None and not bool(block.valid.all()):
            raise ValueError("clusters are compared on rows without padding only")
        super().add(block)
        if self._centroids is not None:
            self._assign(block, self._centroids)

    def build(self, cold: ColdTokens) -> None:
        self._learn()

    def _learn(self) -> None:
        self._centroids = k_means(self._keys.rows, self.options.clusters)
        self._cluster.reset()
        self._cluster.append(nearest(self._keys.rows, self._centroids))

    def _assign(self, block: TokenBlock, centroids: torch.Tensor) -> None:
        self._cluster.append(nearest(block.keys, centroids))

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        keys, centroids, budget, valid = self._keys.rows, self._built(), cold.budget, cold.valid
        batch, heads, held, _ = keys.shape
        queries, groups = query.shape[2], query.shape[1] // heads
        lead = (batch, heads, groups, queries)

        promise = exact_scores(query, centroids, cold.scale, cold.softcap).view(*lead, -1)
        member = self._cluster.rows.long().view(batch, heads, 1, 1, held).expand(*lead, held)
        coarse = promise.gather(-1, member).flatten(1, 2)
        coarse = coarse.masked_fill(~valid[:, None, None], -math.inf)
        probed = group_relevance(coarse, heads).topk(self.cost(held, budget).candidates, dim=-1)

        exact = exact_scores(query, keys, cold.scale, cold.softcap).view(*lead, held)
        chosen = probed.indices.unsqueeze(2).expand(*lead, -1)
        scores = exact.gather(-1, chosen).flatten(1, 2)
        missing = (probed.values == -math.inf).repeat_interleave(groups, dim=1)
        best = group_relevance(scores.masked_fill(missing, -math.inf), heads).topk(budget, dim=-1)
        ids = probed.indices.gather(-1, best.indices)
        return ids.masked_fill(best.values == -math.inf, -1).int()

    def cost(self, n: int, budget: int) -> SearchCost:
        """As a real index would: the members of the probed clusters."""
        return SearchCost(
            min(n, max(budget, math.ceil(self.options.candidate_ratio * n))), self.nbytes()
        )

    def _built(self) -> torch.Tensor:
        assert self._centroids is not None, "build the index first"
        return self._centroids


class RefittedClusterIndex(PrefillClusterIndex):
    """The same, learnt anew from all keys whenever some are added: what it would be undrifted."""

    def _assign(self, block: TokenBlock, centroids: torch.Tensor) -> None:
        self._learn()


class PrefillClusterCache(RetrievalCache):
    """Clusters of the prompt's keys."""

    name: ClassVar[str] = "prefill-clusters"
    config_class: ClassVar[type[RetrievalConfig]] = ClusterConfig
    index_class: ClassVar[type[PrefillClusterIndex]] = PrefillClusterIndex

    @classmethod
    def make_index(cls, options: ClusterConfig, layer: int) -> PrefillClusterIndex:
        """A new, empty index; the same for every layer."""
        return cls.index_class(options)


class RefittedClusterCache(PrefillClusterCache):
    """Clusters of all keys so far."""

    name: ClassVar[str] = "refitted-clusters"
    index_class: ClassVar[type[PrefillClusterIndex]] = RefittedClusterIndex


def nearest(keys: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """``[B, H, n]`` int32: which of ``centroids [B, H, C, D]`` is nearest to each key."""
    closeness = keys.float() @ centroids.transpose(-1, -2)
    return (closeness - centroids.square().sum(-1).unsqueeze(2) / 2).argmax(-1).int()


def k_means(keys: torch.Tensor, clusters: int) -> torch.Tensor:
    """``[B, H, C, D]`` fp32 centroids of ``keys [B, H, n, D]`` by Lloyd's rounds, C at most n.

    They start at keys evenly spread over the text; a centroid that loses all keys stays.
    """
    keys = keys.float()
    batch, heads, held, dim = keys.shape
    count = min(clusters, held)
    starts = torch.arange(count, device=keys.device) * held // count
    centroids = keys.index_select(2, starts)
    for _ in range(_ROUNDS):
        member = nearest(keys, centroids).long()
        sums = torch.zeros_like(centroids)
        sums.scatter_add_(2, member.unsqueeze(-1).expand(-1, -1, -1, dim), keys)
        sizes = keys.new_zeros(batch, heads, count)
        sizes.scatter_add_(2, member, torch.ones_like(keys[..., 0]))
        means = sums / sizes.clamp(min=1).unsqueeze(-1)
        centroids = torch.where(sizes.unsqueeze(-1) > 0, means, centroids)
    return centroids
