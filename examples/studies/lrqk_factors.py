"""How good LRQK's factors are: what low-rank proxies miss of the scores of a real model. A text is
read once; queries and keys of every retrieval layer are kept in fp32, so take up to some 8K
tokens. For each rank, proxies are made in several ways (--variants). Their relative error over
all queries and keys is exact. Recall of the exact top-k is that of the last --queries, each
among all tokens before it. Without --text the model reads a document of needles with questions
at its end, which is what --model needle speaks.

    python examples/studies/lrqk_factors.py --model needle --plot factors.png
    python examples/studies/lrqk_factors.py --model reference --text novel.txt --context 2K
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from ablation import Ablation, caches_option, not_here, parts_option, values_option
from lrqk_proxies import ALTERNATING, OPTIMUM, PER_HEAD, VARIANTS, LayerStudy
from study_tables import Found
from tqdm import tqdm

from hf_kvret.evaluation.arguments import whole_number
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.common_options import (
    budget_option,
    context_option,
    count_option,
    text_option,
)
from hf_kvret.evaluation.contexts import describe_file
from hf_kvret.evaluation.plots import plot_lines
from hf_kvret.evaluation.recording import read_layers
from hf_kvret.evaluation.results import Cell
from hf_kvret.evaluation.scripts import run_script
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.tables import markdown_table
from hf_kvret.evaluation.task import Choices
from hf_kvret.methods.lrqk import LRQKConfig

# Options of the cache that count here; variants choose the others, or nothing depends on them.
_COUNT = ("top_k", "recency", "half_life", "iterations", "penalty", "seed")


# Errors that should be equal differ by the rounding of the maps, which are fp32.
_ROUNDING = 1e-6
# As many lines as there are colours; with more variants than that, these are drawn.
_LINES = 10
_DRAWN = (
    *(PER_HEAD, *ALTERNATING, f"{PER_HEAD} r/G"),
    *("shared", "shared int8", "shared weighted", "shared unseen"),
)
# On a logarithmic scale, errors below this are rounding and would hide the others.
_LEAST_SHOWN = 1e-5

Key = tuple[str, int, str, int]


def _tables(cells: Found) -> str:
    """Errors, then recall and mass: a row for each rank and variant, a column a layer."""
    known = _by_rank(cells)
    numbers = sorted({one["layer"] for layers in known.values() for one in layers})
    several = len({cache for cache, *_ in known}) > 1
    parts = []
    for title, name, means in (
        ("relative error of the scores:", "error", {"centered_error": "less mean score"}),
        ("recall of the exact top-k:", "recall", {"mass": "mass", "best_mass": "best mass"}),
    ):
        rows = []
        for (cache, length, variant, rank), layers in known.items():
            row = [f"{length}", f"{rank}", variant, f"{_mean(layers, 'numbers'):g}"]
            values = {one["layer"]: one[name] for one in layers}
            row += [f"{values[n]:.4f}" if n in values else "-" for n in numbers]
            row += [f"{_mean(layers, mean):.4f}" for mean in (name, *means)]
            rows.append([cache, *row] if several else row)
        head = ["cache"] if several else []
        head += ["tokens", "rank", "variant", "numbers", *(f"layer {n}" for n in numbers), "mean"]
        parts += [title, markdown_table([*head, *means.values()], rows)]
    return "\n\n".join([*parts, *_checks(known)])


def _plot(path: Path, cells: Found, *, name: str, y: str) -> None:
    """One number of the factors over rank, mean of layers."""
    known = _by_rank(cells)
    if len({variant for _, _, variant, _ in known}) > _LINES:
        known = {key: layers for key, layers in known.items() if key[2] in _DRAWN}
    one_text = len({(cache, length) for cache, length, _, _ in known}) == 1
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for (cache, length, variant, rank), layers in known.items():
        label = variant if one_text else f"{variant} ({cache}, {length})"
        value = _mean(layers, name)
        if name == "recall" or value > _LEAST_SHOWN:
            xs, ys = lines.setdefault(label, ([], []))
            xs.append(rank)
            ys.append(value)
    title, y = "LRQK's factors", f"{y}, mean of layers"
    plot_lines(path, lines, title=title, x="rank", y=y, log_x=True, log_y=name == "error")


def _by_rank(cells: Found) -> dict[Key, list[dict[str, Any]]]:
    """The layers of each cell that has any, by cache, length, variant and rank."""
    known: dict[Key, list[dict[str, Any]]] = {
        (cell["cache"], cell["length"], cell["variant"], cell["rank"]): found["layers"]
        for cell, found in cells
        if found["layers"]
    }
    order = {name: number for number, name in enumerate(VARIANTS)}
    places = sorted(known, key=lambda key: (key[1], key[0], key[3], order[key[2]]))
    return {key: known[key] for key in places}


def _checks(known: dict[Key, list[dict[str, Any]]]) -> list[str]:
    """What must hold, counted over layers, ranks and starts; nothing where it was not measured."""
    kept, furthest = [], []
    for (cache, length, variant, rank), layers in known.items():
        closed = known.get((cache, length, PER_HEAD, rank), [])
        for ours, theirs in zip(closed, layers, strict=bool(closed)):
            pairs = list(zip(ours["errors"], theirs["errors"], strict=True))
            if variant == OPTIMUM:
                furthest.append(max(abs(one - other) for one, other in pairs))
            elif variant in ALTERNATING:
                kept.append(all(one <= other + _ROUNDING for one, other in pairs))
    lines = []
    if furthest:
        lines.append(f"closed form and optimum: errors at most {max(furthest):.1e} apart in a head")
    if kept:
        lines.append(
            f"closed form no worse than ALS in any head (up to {_ROUNDING:g}): {sum(kept)} of "
            f"{len(kept)} layer x rank x start"
        )
    return lines


def _mean(layers: list[dict[str, Any]], name: str) -> float:
    return fmean(one[name] for one in layers)


TABLES = {"": _tables}
PLOTS = {
    "error": partial(_plot, name="error", y="relative error"),
    "recall": partial(_plot, name="recall", y="recall of the exact top-k"),
}


@dataclass(frozen=True, kw_only=True)
class LRQKFactors(Ablation):
    """How good LRQK's factors are: what low-rank proxies miss of the scores of a real model."""

    name = "lrqk-factors"
    method = "lrqk"
    example = "iterations=4"
    chosen = tuple(one.name for one in fields(LRQKConfig) if one.name not in _COUNT)
    instead = (
        f": --ranks and --variants say it, or nothing needs it. What counts: {', '.join(_COUNT)}"
    )
    tables = TABLES
    plots = PLOTS
    drawn = MappingProxyType({"error": "", "recall": ""})

    caches: str | None = caches_option("lrqk")
    top_k: int | float = budget_option(100)
    text: Path | None = text_option("default: a document of needles", required=False)
    context: tuple[int, ...] = context_option((2048,), "tokens of the text")
    windows: int = not_here(1)
    parts: tuple[str, ...] = not_here(("",))
    new_tokens: int = not_here()
    step: int = not_here()
    ranks: tuple[int, ...] = values_option(
        (8, 16, 32, 48, 64), "left out above the head dim", whole_number(1)
    )
    ways: tuple[str, ...] = parts_option(VARIANTS, "--variants")
    queries: int = count_option(64, "newest tokens of the text that select")
    # Queries and keys of the last text, for the cells about it.
    _read: dict[int, list[LayerStudy]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def check(self) -> None:
        if self.store != "device":
            raise ValueError(f"--store {self.store}: lrqk-factors stores nothing, leave it out")
        super().check()

    def details(self) -> dict[str, Any]:
        text = describe_file("--text", self.text)
        return {"text": text or "document of needles", "queries": self.queries}

    def cells_of(self, caches: Sequence[str]) -> list[Cell]:
        self.check_caches(caches)
        # Lengths come first, so that each text is read once for all that is asked about it.
        return [
            {"cache": cache, "length": length, "variant": variant, "rank": rank}
            for length in self.context
            for cache in caches
            for variant in self.ways
            for rank in self.ranks
        ]

    def variants(self, part: str) -> Sequence[str]:
        return self.ways

    def asking(self, part: str, length: int) -> int:
        return self.queries

    def check_cells(self, cells: Sequence[Cell], subject: Subject, choices: Choices) -> None:
        super().check_cells(cells, subject, choices)
        for cell in cells:
            self._top_k(cell["length"], choices[cell["cache"]])

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        """The numbers of one cell; ``layers`` leaves out those with a head dim below the rank."""
        length, rank = cell["length"], cell["rank"]
        top_k, options = self._top_k(length, choice)
        variant, studies = VARIANTS[cell["variant"]], self._studies(length, subject)
        largest = max(study.dim for study in studies)
        if min(self.ranks) > largest:
            raise ValueError(
                f"--ranks {','.join(map(str, self.ranks))}: all are above the head dim {largest}"
            )
        fitting = [study for study in studies if rank <= study.dim]
        found = []
        for study in tqdm(fitting, desc="layers", leave=False):
            quality = study.judge(variant(study, rank, options), top_k)
            found.append({"layer": study.layer, **quality})
        return {"top_k": top_k, "layers": found}

    def _top_k(self, length: int, choice: CacheChoice) -> tuple[int, LRQKConfig]:
        """How many tokens a query selects, and the options of the cache."""
        assert isinstance(choice.options, LRQKConfig)
        top_k = choice.options.budget(length)
        if top_k >= length - self.queries:
            raise ValueError(
                f"--context {length}: --queries {self.queries} and --top-k {top_k} leave nothing "
                "to choose; take a longer text, or less of them"
            )
        return top_k, choice.options

    def _studies(self, length: int, subject: Subject) -> list[LayerStudy]:
        if length not in self._read:
            self._read.clear()
            (text,) = self.contexts(subject, "", length)
            self._read[length] = [
                LayerStudy(**vars(layer), last=self.queries)
                for layer in read_layers(subject.model, text)
            ]
        return self._read[length]


MEASUREMENT = LRQKFactors

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
