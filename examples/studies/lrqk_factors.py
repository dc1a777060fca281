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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from ablation import Ablation, CellResults, caches_option, not_here, parts_option, values_option
from tqdm import tqdm

from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.recording import RecordedLayer, read_layers
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.task import Choices
from hf_kvret.lab.evaluate.texts import describe_file
from hf_kvret.lab.program.arguments import whole_number
from hf_kvret.lab.program.common_options import (
    budget_option,
    context_option,
    count_option,
    text_option,
)
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.methods.lrqk import LRQKConfig
from hf_kvret.methods.lrqk.als import (
    RANDOM_START,
    STARTS,
    Moments,
    RandomSource,
    alternating,
    start_sketches,
)
from hf_kvret.methods.lrqk.factors import Factors, KeyGrams, QueryGrams, closed_form
from hf_kvret.methods.lrqk.proxies import Proxies as RoundedProxies
from hf_kvret.observe.recall import exact_scores
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.soft_cap import soft_cap_

# Options of the cache that count here; variants choose the others, or nothing depends on them.
_COUNT = ("top_k", "recency", "half_life", "iterations", "tolerance", "penalty", "seed")


# Errors that should be equal differ by the rounding of the maps, which are fp32.
_ROUNDING = 1e-6
# As many lines as there are colours; with more variants than that, these are drawn.
_LINES = 10
# On a logarithmic scale, errors below this are rounding and would hide the others.
_LEAST_SHOWN = 1e-5

Key = tuple[str, int, str, int]


@dataclass(frozen=True, eq=False)
class Proxies:
    """What stands for the keys of a layer.

    Attributes:
        to_query: ``[F, D, r]`` fp32, of one set of factors for each KV head, or each query head.
        rows: ``[F, l, r]`` fp32, of the keys less ``mean``.
        mean: ``[Hkv, 1, D]`` fp32, a key whose part of a score is exact; 0 for none.
    """

    to_query: torch.Tensor
    rows: torch.Tensor
    mean: torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerStudy(RecordedLayer):
    """A recorded layer whose last ``last`` queries select, each among the tokens before it."""

    last: int

    @property
    def dim(self) -> int:
        """D."""
        return self.keys.shape[-1]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.queries.shape[0] // self.keys.shape[0]

    @cached_property
    def query_gram(self) -> torch.Tensor:
        """``[Hq, D, D]`` fp64, of all queries alike."""
        return gram(self.queries)

    @cached_property
    def key_gram(self) -> torch.Tensor:
        """``[Hq, D, D]`` fp64, of each query head's keys."""
        return self.spread(gram(self.keys))

    def spread(self, parts: torch.Tensor) -> torch.Tensor:
        """``[Hq, ...]``: what each query head has of ``parts [F, ...]``."""
        return parts.repeat_interleave(self.queries.shape[0] // parts.shape[0], dim=0)

    def proxies(self, factors: Factors, center: bool = False) -> Proxies:
        """By maps ``[F, D, r]``, kept in fp32; of keys less their mean where ``center`` says."""
        mean = self.keys.mean(1, keepdim=True)
        mean = mean if center else torch.zeros_like(mean)
        sets = len(factors.to_key) // len(self.keys)
        rows = (self.keys - mean).repeat_interleave(sets, dim=0) @ factors.to_key
        return Proxies(factors.to_query, rows, mean)

    def errors(self, proxies: Proxies) -> torch.Tensor:
        """``[Hq]`` fp64: relative Frobenius errors of the scores of all queries with all keys.

        What proxies miss is ``Q R^T`` with ``R = K - mean - rows to_query^T``.
        """
        sets = len(proxies.rows) // len(self.keys)
        keys = (self.keys.double() - proxies.mean).repeat_interleave(sets, dim=0)
        left = self.spread(gram(keys - proxies.rows.double() @ proxies.to_query.double().mT))
        whole = (self.query_gram * self.key_gram).sum((-2, -1))
        return ((self.query_gram * left).sum((-2, -1)) / whole).clamp(min=0.0).sqrt()

    def judge(self, proxies: Proxies, top_k: int) -> dict[str, Any]:
        """How good proxies are, as plain JSON values.

        ``errors`` of each query head, ``error`` their mean. Of the last queries ``recall``, the
        share of the exact top-k that was selected, and ``mass`` and ``best_mass``, the share of the
        attention mass on the selected tokens and on the exact top-k: means over heads and queries.
        ``numbers`` are kept for a token and KV head.
        """
        heads, asking = self.keys.shape[0], self.queries[:, -self.last :]
        dots = (asking @ self.spread(proxies.to_query)) @ self.spread(proxies.rows).mT
        dots = dots + asking @ self.spread(proxies.mean).mT
        exact = self._logits(exact_scores(asking[None], self.keys[None], 1.0)[0])
        best, chosen = (
            group_relevance(logits[None], heads)[0].topk(top_k, dim=-1).indices
            for logits in (exact, self._logits(dots))
        )
        marks = torch.zeros(*chosen.shape[:2], exact.shape[-1], dtype=torch.bool)
        marks = marks.to(chosen.device).scatter_(-1, chosen, True)
        shares, errors = exact.softmax(dim=-1), self.errors(proxies).tolist()
        return {
            "error": fmean(errors),
            "recall": float(marks.gather(-1, best).float().mean()),
            "mass": float(shares.gather(-1, self.spread(chosen)).sum(-1).mean()),
            "best_mass": float(shares.gather(-1, self.spread(best)).sum(-1).mean()),
            "numbers": len(proxies.rows) // heads * proxies.rows.shape[-1],
            "errors": errors,
        }

    def _logits(self, dots: torch.Tensor) -> torch.Tensor:
        """Scaled, capped, and -inf from a query's own token on, ``[Hq, N, l]`` fp32."""
        scores = soft_cap_(dots * self.scale, self.softcap)
        keys = torch.arange(dots.shape[-1], device=dots.device)
        return scores.masked_fill(keys >= keys[-self.last :, None], float("-inf"))


def gram(rows: torch.Tensor) -> torch.Tensor:
    """``X^T X`` in fp64 of ``rows [..., l, D]``."""
    rows = rows.double()
    return rows.mT @ rows


Variant = Callable[[LayerStudy, int, LRQKConfig], Proxies]
"""A way to make proxies of a rank, which is at most the head dim.

The options say what the variant leaves open: rounds, penalty, recency, half-life, seed.
"""


def _per_head(study: LayerStudy, rank: int, options: LRQKConfig) -> Proxies:
    """The closed form for each query head."""
    return study.proxies(closed_form(study.query_gram, study.key_gram, rank))


def _per_head_at_equal_bytes(study: LayerStudy, rank: int, options: LRQKConfig) -> Proxies:
    """The same with rank r / G, rounded down: all heads of a group take what a shared set takes."""
    return _per_head(study, max(1, rank // study.group), options)


def _alternating(study: LayerStudy, rank: int, options: LRQKConfig, *, start: str) -> Proxies:
    """The paper's algorithm 1 for each query head, from one of its three starts (B.6)."""
    is_random, chance = start == RANDOM_START, RandomSource(options.seed)
    of_queries, of_keys = Moments(is_random), Moments(is_random)
    of_queries.add(study.queries[None], rank, chance)
    of_keys.add(study.spread(study.keys)[None], rank, chance)
    starts = start_sketches(start, of_queries, of_keys, rank)
    assert of_queries.gram is not None and of_keys.gram is not None
    grams = of_queries.gram, of_keys.gram
    factors = alternating(
        *grams, *starts, options.iterations, options.penalty, options.tolerance, of_keys.count
    )
    return study.proxies(Factors(factors.to_query[0], factors.to_key[0]))


@dataclass(frozen=True)
class Shared:
    """The closed form for each KV head, from the Grams that an index adds up.

    Attributes:
        center: leave the mean key out.
        weighted: the newest queries weigh more, by ``recency``; else all alike.
        seen: the last queries, which select, and their keys are in the Grams.
        dtype: of proxies, a ``LRQKConfig.proxy_dtype``; None keeps fp32.
    """

    center: bool = False
    weighted: bool = False
    seen: bool = True
    dtype: str | None = None

    def __call__(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Proxies:
        proxies = study.proxies(self.fit(study, rank, options), self.center)
        if self.dtype is None:
            return proxies
        rounded = RoundedProxies(self.dtype)
        rounded.replace([proxies.rows[None]])
        return replace(proxies, rows=rounded.values(rounded.rows)[0])

    def fit(self, study: LayerStudy, rank: int, options: LRQKConfig) -> Factors:
        """Maps ``[Hkv, D, r]``."""
        end = study.keys.shape[1] - (0 if self.seen else study.last)
        of_queries = QueryGrams(study.keys.shape[0], options.half_life)
        of_queries.add(study.queries[None, :, :end], None)
        of_keys = KeyGrams()
        of_keys.add(study.keys[None, :, :end], None)
        queries = of_queries.weighted(options.recency if self.weighted else 0.0)
        factors = closed_form(queries, of_keys.matrix(self.center), rank)
        return Factors(factors.to_query[0], factors.to_key[0])


ALTERNATING: Mapping[str, Variant] = {
    f"als {start}": partial(_alternating, start=start) for start in STARTS
}
PER_HEAD = "closed per head"
VARIANTS: Mapping[str, Variant] = {
    PER_HEAD: _per_head,
    **ALTERNATING,
    f"{PER_HEAD} r/G": _per_head_at_equal_bytes,
    "shared": Shared(),
    "shared bf16": Shared(dtype="bfloat16"),
    "shared int8": Shared(dtype="int8"),
    "shared centered": Shared(center=True),
    "shared weighted": Shared(weighted=True),
    "shared centered weighted": Shared(center=True, weighted=True),
    "shared unseen": Shared(seen=False),
    "shared weighted unseen": Shared(weighted=True, seen=False),
}
_DRAWN = (
    *(PER_HEAD, *ALTERNATING, f"{PER_HEAD} r/G"),
    *("shared", "shared int8", "shared weighted", "shared unseen"),
)


def _tables(cells: CellResults) -> str:
    """Errors, then recall and mass: a row for each rank and variant, a column a layer."""
    layers_by_key = _by_rank(cells)
    layer_ids = sorted({one["layer"] for layers in layers_by_key.values() for one in layers})
    parts = []
    for title, name, means in (
        ("relative error of the scores:", "error", {}),
        ("recall of the exact top-k:", "recall", {"mass": "mass", "best_mass": "best mass"}),
    ):
        rows = []
        for (cache, length, variant, rank), layers in layers_by_key.items():
            row = [cache, f"{length}", f"{rank}", variant, f"{_mean(layers, 'numbers'):g}"]
            values = {one["layer"]: one[name] for one in layers}
            row += [f"{values[n]:.4f}" if n in values else "-" for n in layer_ids]
            rows.append([*row, *(f"{_mean(layers, mean):.4f}" for mean in (name, *means))])
        head = ["cache", "tokens", "rank", "variant", "numbers"]
        head += [*(f"layer {n}" for n in layer_ids), "mean", *means.values()]
        parts += [title, markdown_table(head, rows)]
    return "\n\n".join([*parts, *_checks(layers_by_key)])


def _plot(path: Path, cells: CellResults, *, name: str, y: str) -> None:
    """One number of the factors over rank, mean of layers."""
    layers_by_key = _by_rank(cells)
    if len({variant for _, _, variant, _ in layers_by_key}) > _LINES:
        layers_by_key = {key: layers for key, layers in layers_by_key.items() if key[2] in _DRAWN}
    one_text = len({(cache, length) for cache, length, _, _ in layers_by_key}) == 1
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for (cache, length, variant, rank), layers in layers_by_key.items():
        label = variant if one_text else f"{variant} ({cache}, {length})"
        value = _mean(layers, name)
        if name == "recall" or value > _LEAST_SHOWN:
            xs, ys = lines.setdefault(label, ([], []))
            xs.append(rank)
            ys.append(value)
    title, y = "LRQK's factors", f"{y}, mean of layers"
    plot_lines(path, lines, title=title, x="rank", y=y, log_x=True, log_y=name == "error")


def _by_rank(cells: CellResults) -> dict[Key, list[dict[str, Any]]]:
    """The layers of each cell that has any, by cache, length, variant and rank."""
    layers_by_key: dict[Key, list[dict[str, Any]]] = {
        (cell["cache"], cell["length"], cell["variant"], cell["rank"]): result["layers"]
        for cell, result in cells
        if result["layers"]
    }
    order = {name: number for number, name in enumerate(VARIANTS)}
    keys = sorted(layers_by_key, key=lambda key: (key[1], key[0], key[3], order[key[2]]))
    return {key: layers_by_key[key] for key in keys}


def _checks(layers_by_key: dict[Key, list[dict[str, Any]]]) -> list[str]:
    """In how many layers, ranks and starts no head of the closed form misses more than ALS."""
    kept = [
        all(
            one <= other + _ROUNDING
            for one, other in zip(ours["errors"], theirs["errors"], strict=True)
        )
        for (cache, length, variant, rank), layers in layers_by_key.items()
        if variant in ALTERNATING and (cache, length, PER_HEAD, rank) in layers_by_key
        for ours, theirs in zip(layers_by_key[cache, length, PER_HEAD, rank], layers, strict=True)
    ]
    if not kept:
        return []
    claim = f"closed form no worse than ALS in any head (up to {_ROUNDING:g})"
    return [f"{claim}: {sum(kept)} of {len(kept)} layer x rank x start"]


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
    smallest = "--model needle --context 300 --top-k 20 --queries 32 --ranks 8"

    caches: str | None = caches_option("lrqk")
    top_k: int | float = budget_option(100)
    text: Path | None = text_option("default: a document of needles", required=False)
    context: tuple[int, ...] = context_option((2048,), "tokens of the text")
    windows: int = not_here(1)
    parts: tuple[str, ...] = not_here(("",))
    new_tokens: int = not_here()
    step: int = not_here(1)
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
        results = []
        for study in tqdm(fitting, desc="layers", leave=False):
            quality = study.judge(variant(study, rank, options), top_k)
            results.append({"layer": study.layer, **quality})
        return {"top_k": top_k, "layers": results}

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
