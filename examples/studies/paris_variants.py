"""ParisKV's variants and opponents, made from the options of one cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ablation import made
from paris_parts_off import UncorrectedParisKVCache, UnrotatedParisKVCache
from prefill_clusters import ClusterConfig, PrefillClusterCache, RefittedClusterCache

from hf_kvret.cache import RetrievalCache
from hf_kvret.config import RetrievalConfig
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.methods.paris import ParisConfig, ParisKVCache


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


def at_ratio(options: ParisConfig, ratio: float) -> ParisConfig:
    """``options`` with that share of candidates at every length.

    At least as many keys earn points in a subspace (section 4.2.2: rho >= beta).
    """
    schedule = tuple((length, ratio, max(rho, ratio)) for length, _, rho in options.schedule)
    return options.replace(schedule=schedule)


def switched(name: str, options: ParisConfig, ratio: float) -> CacheChoice:
    """The cache of a name of ``SWITCHES``, or of ``SHIPPED``, which keeps its own schedule."""
    if name == SHIPPED:
        return made(name, ParisKVCache, options)
    switch = SWITCHES[name]
    chosen = at_ratio(options, switch.ratio or ratio).replace(**switch.changes)
    return made(name, switch.cache_class, chosen)


def with_ratio(options: ParisConfig, ratio: float) -> CacheChoice:
    """ParisKV with that share of candidates."""
    return made(f"ratio {ratio:g}", ParisKVCache, at_ratio(options, ratio))


def drifting(name: str, options: ParisConfig, ratio: float, clusters: int) -> CacheChoice:
    """The cache of a name of ``DRIFT``, with the same regions, budget and number of candidates."""
    if DRIFT[name] is ParisKVCache:
        return made(name, ParisKVCache, at_ratio(options, ratio))
    common = {one.name: getattr(options, one.name) for one in dataclasses.fields(RetrievalConfig)}
    chosen = ClusterConfig(**common, candidate_ratio=ratio, clusters=clusters)
    return made(name, DRIFT[name], chosen)
