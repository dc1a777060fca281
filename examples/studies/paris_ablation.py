"""What each part of ParisKV is worth: recall of the exact top-k without it. switches: one part off
at a time, at --ratio candidates. ratios: recall against the share of candidates, at each length
(the paper's figure 9). drift: recall along --drift-tokens after the shortest length, beside
clusters that were learnt from the prompt (figures 1 and 10). All variants follow the same text,
after each context.

    python examples/studies/paris_ablation.py --text novel.txt --context 4K,8K --plot a.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from ablation import Ablation, caches_option, made, parts_option
from follower import Follower
from prefill_clusters import ClusterConfig, PrefillClusterCache, RefittedClusterCache
from study_tables import CANDIDATES, Found, bars_of, by_length, curves_of, stretches_of

from hf_kvret.cache import RetrievalCache
from hf_kvret.config import RetrievalConfig
from hf_kvret.evaluation.arguments import number, several
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.common_options import (
    budget_option,
    context_option,
    count_option,
    text_option,
    then_option,
)
from hf_kvret.evaluation.contexts import describe_file, text_windows
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.results import Cell
from hf_kvret.evaluation.scripts import run_script
from hf_kvret.evaluation.stretches import Pace, mean_of, share
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.tables import markdown_table
from hf_kvret.methods.paris import ParisConfig, ParisKVCache
from hf_kvret.methods.paris.ablations import UncorrectedParisKVCache, UnrotatedParisKVCache

PARTS = ("switches", "ratios", "drift")


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
    part: str, name: str, given: ParisConfig, ratio: float = 0.1, clusters: int = 256
) -> CacheChoice:
    """The cache of a variant, with that share of candidates but in ``SHIPPED`` and in ``ratios``.

    Opponents have the same regions, budget and number of candidates.
    """
    if name == SHIPPED:
        return made(name, ParisKVCache, given)
    if part == "ratios":
        return made(f"ratio {name}", ParisKVCache, given.with_candidates(float(name)))
    if part == "switches":
        switch = SWITCHES[name]
        chosen = given.with_candidates(switch.ratio or ratio).replace(**switch.changes)
        return made(name, switch.cache_class, chosen)
    if DRIFT[name] is ParisKVCache:
        return made(name, ParisKVCache, given.with_candidates(ratio))
    common = {one.name: getattr(given, one.name) for one in fields(RetrievalConfig)}
    options = ClusterConfig(**common, candidate_ratio=ratio, clusters=clusters)
    return made(name, DRIFT[name], options)


def _variants_table(cells: Found) -> str:
    """A row a variant, recall and mass of the best at each length."""
    columns, rows = by_length(cells, ("recall", "mass", "candidates"))
    title = "variant" if cells[0][0]["part"] == "switches" else "candidate ratio"
    return markdown_table(["cache", title, *columns], [[*key, *row] for key, row in rows.items()])


def _drift_table(cells: Found) -> str:
    rows = []
    for cell, found in cells:
        stretches = found["stretches"]
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
