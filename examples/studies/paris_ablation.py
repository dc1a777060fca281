"""What each part of ParisKV is worth: recall of the exact top-k without it. switches: one part off
at a time, at --ratio candidates. ratios: recall against the share of candidates, at each length
(the paper's figure 9). drift: recall along --drift-tokens after the shortest length, beside
clusters that were learnt from the prompt (figures 1 and 10). All variants follow the same text,
after each context.

    python examples/studies/paris_ablation.py --text novel.txt --context 4K,8K --plot a.png
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from ablation import (
    CANDIDATES,
    Ablation,
    CellResults,
    bars_of,
    by_length,
    caches_option,
    curves_of,
    made,
    parts_option,
    stretches_of,
)
from follower import Follower

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, SearchCost
from hf_kvret.contracts.state import tensor
from hf_kvret.contracts.token_buffer import TokenBuffer, tokens
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.paris_ablations import UncorrectedParisKVCache, UnrotatedParisKVCache
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.teacher_forcing import Pace, mean_of
from hf_kvret.lab.evaluate.texts import describe_file, text_windows
from hf_kvret.lab.program.arguments import number, several
from hf_kvret.lab.program.common_options import (
    budget_option,
    context_option,
    count_option,
    text_option,
    then_option,
)
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table, share
from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret.methods.paris import ParisConfig, ParisKVCache
from hf_kvret.observe.recall import exact_scores
from hf_kvret.options.config import RetrievalConfig
from hf_kvret_kernels.relevance import group_relevance

PARTS = ("switches", "ratios", "drift")
_ROUNDS = 10
"""Of k-means."""


@dataclass(frozen=True)
class ClusterConfig(RetrievalConfig):
    """Clusters of each KV head, at most one a key; share of cold tokens that is scored exactly.

    The kind of index that ParisKV's figures 1 and 10 measure themselves against: its centroids fit
    the keys they were learnt from. What it picks is reranked with exact scores. It keeps all keys
    on the device and serves one row without padding.
    """

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
    Config: ClassVar[type[RetrievalConfig]] = ClusterConfig
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


@dataclass(frozen=True)
class Switch:
    """A variant of ParisKV: its class, changed options, and its own share of candidates."""

    cache_class: type[ParisKVCache] = ParisKVCache
    changes: dict[str, Any] = field(default_factory=dict)
    ratio: float | None = None


# The first half acts on stage 1, so few candidates show it best; with all tokens as candidates
# only stage 2 is left.
SWITCHES: dict[str, Switch] = {
    "all on": Switch(),
    "one tier": Switch(changes={"tiers": (1.0,)}),
    # The authors' levels are those of subspaces of 8.
    "subspaces of 4": Switch(changes={"subspace_dim": 4, "levels": None}),
    "rotation off": Switch(UnrotatedParisKVCache),
    "center off": Switch(changes={"center": False}),
    "rotation and center off": Switch(UnrotatedParisKVCache, {"center": False}),
    "mean query": Switch(changes={"group_reduce": "mean"}),
    "alpha off": Switch(UncorrectedParisKVCache),
    "stage 2 alone": Switch(ratio=1.0),
    "stage 2 alone, alpha off": Switch(UncorrectedParisKVCache, ratio=1.0),
    "stage 2 alone, rotation off": Switch(UnrotatedParisKVCache, ratio=1.0),
}
SHIPPED = "as shipped"
DRIFT: dict[str, type[RetrievalCache]] = {
    "paris": ParisKVCache,
    "prefill clusters": PrefillClusterCache,
    "refitted clusters": RefittedClusterCache,
}


def variant(
    part: str, name: str, base: ParisConfig, ratio: float = 0.1, clusters: int = 256
) -> CacheChoice:
    """The cache of a variant, with that share of candidates but in ``SHIPPED`` and in ``ratios``.

    Opponents have the same window, budget and number of candidates.
    """
    if name == SHIPPED:
        return made(name, ParisKVCache, base)
    if part == "ratios":
        return made(f"ratio {name}", ParisKVCache, base.with_candidates(float(name)))
    if part == "switches":
        switch = SWITCHES[name]
        chosen = base.with_candidates(switch.ratio or ratio).replace(**switch.changes)
        return made(name, switch.cache_class, chosen)
    if DRIFT[name] is ParisKVCache:
        return made(name, ParisKVCache, base.with_candidates(ratio))
    common = {one.name: getattr(base, one.name) for one in fields(RetrievalConfig)}
    options = ClusterConfig(**common, candidate_ratio=ratio, clusters=clusters)
    return made(name, DRIFT[name], options)


def _variants_table(cells: CellResults) -> str:
    """A row a variant, recall and mass of the best at each length."""
    columns, rows = by_length(cells, ("recall", "mass", "candidates"))
    title = "variant" if cells[0][0]["part"] == "switches" else "candidate ratio"
    return markdown_table(["cache", title, *columns], [[*key, *row] for key, row in rows.items()])


def _drift_table(cells: CellResults) -> str:
    rows = []
    for cell, result in cells:
        stretches = result["stretches"]
        row = [cell["cache"], cell["variant"], str(cell["length"])]
        for name in ("overlap", "mass"):
            row += map(share, (stretches[0][name], stretches[-1][name], mean_of(stretches, name)))
        rows.append(row)
    kinds = ("recall, first", "last", "mean", "mass, first", "last", "mean")
    return markdown_table(("cache", "drift", "context", *kinds), rows)


TABLES = {"switches": _variants_table, "ratios": _variants_table, "drift": _drift_table}
PLOTS = {
    "ratios": curves_of("candidates needed", *CANDIDATES, whole=True),
    "switches": bars_of("ParisKV, one part off at a time"),
    "drift": stretches_of("recall along a text", x="generated tokens"),
}


@dataclass(frozen=True, kw_only=True)
class ParisAblation(Ablation):
    """What each part of ParisKV is worth: recall of the exact top-k without it."""

    name = "paris-ablation"
    method = "paris"
    example = "center=false"
    described = (*("windows", "ratio", "clusters", "new_tokens", "drift_tokens", "every", "step"),)
    once = ("drift",)
    tables = TABLES
    plots = PLOTS
    smallest = (
        "--model reference --text examples/notebooks/text.txt --context 256 --new-tokens 16 "
        "--drift-tokens 32 --every 16 --ratios 0.1 --top-k 16 --clusters 4 "
        "--caches paris:dense_below=0:recent=16:flush=16"
    )

    # The paper's budget, and the only method that there is something to take away from.
    caches: str | None = caches_option("paris")
    top_k: int | float = budget_option(100)
    text: Path = text_option()
    then: Path | None = then_option("the drift part goes on with after the context")
    context: tuple[int, ...] = context_option((4096, 8192, 16384), "tokens of a context")
    parts: tuple[str, ...] = parts_option(PARTS)
    ratio: float = option(0.1, "share of candidates of switches and drift", kind=number(0, 1))
    ratios: tuple[float, ...] = option(
        (0.02, 0.05, 0.1, 0.2, 0.3, 0.5), "of the part ratios", kind=several(number(0, 1))
    )
    drift_tokens: int = count_option(2048, "of the drift part")
    every: int = count_option(128, "drift tokens a number")
    clusters: int = count_option(256, "learnt by the opponents, for each KV head")

    @property
    def drift(self) -> Pace:
        """Of the drift part."""
        return Pace(self.drift_tokens, self.every, self.step)

    def __post_init__(self) -> None:
        _ = self.drift  # Refuses steps that cross the end of a stretch.

    def details(self) -> dict[str, Any]:
        return {**super().details(), "then": describe_file("--then", self.then)}

    def variants(self, part: str) -> Sequence[str]:
        if part == "ratios":
            return [f"{ratio:g}" for ratio in self.ratios]
        return [SHIPPED, *SWITCHES] if part == "switches" else list(DRIFT)

    def following(self, part: str) -> int:
        return self.drift_tokens if part == "drift" else self.new_tokens

    def contexts(self, subject: Subject, part: str, length: int) -> list[torch.Tensor]:
        then, new = self.then if part == "drift" else None, self.following(part)
        return text_windows(subject, self.name, self.text, length, new, self.windows, then)

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        part, length = cell["part"], cell["length"]
        assert isinstance(choice.options, ParisConfig)
        chosen = variant(part, cell["variant"], choice.options, self.ratio, self.clusters)
        follower = Follower(subject, chosen, self.method)
        for window in self.contexts(subject, part, length):
            follower.follow(window, length, self.drift if part == "drift" else self.pace)
        return follower.result()


MEASUREMENT = ParisAblation

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
