"""Where ParisKV loses tokens: among its candidates (stage 1), or by their order (stage 2).

Keys are those of a model's layers (--parts model), or drawn (--parts drawn): 256 numbers, one KV
head for four query heads, scaled like normalized keys with a few strong channels, turned by RoPE,
with a topic that drifts. Queries come after the keys. The exact top-k is that of the largest
softmax weight over the heads of a group. --parts model-alpha,drawn-alpha measure the estimated
inner products with and without their correction alpha (the paper's equations 7 to 10, section 5.3).

    python examples/studies/paris_stages.py --model smollm2 --text essays.json --context 3500,7K
    python examples/studies/paris_stages.py --model needle --parts drawn --context 4K,12K
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from ablation import Ablation, CellResults, bars_of, caches_option, not_here, parts_option
from tqdm import tqdm

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.paris_ablations import UncorrectedIndex
from hf_kvret.lab.evaluate.recording import RecordedLayer, read_layers
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.program.common_options import budget_option, count_option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.methods.paris.index import ParisIndex
from hf_kvret.observe.recall import exact_scores
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory
from hf_kvret_kernels.relevance import group_relevance

# Tokens of the first of the pieces that a prompt comes in.
_PIECE = 512
_DIM, _GROUP, _STRONG, _TOPIC_LEN = 256, 4, 8, 256
_PAPER_OPTIONS = {"schedule": ParisConfig.presets["paper"]["schedule"], "per_selected": 1.0}
_WIDE_SCHEDULE = tuple((length, beta, 0.75) for length, beta, _ in _PAPER_OPTIONS["schedule"])
PARTS = ("model", "drawn", "model-alpha", "drawn-alpha")
# By name the options, and whether the mean is that of the first piece of the prompt only.
VARIANTS: MappingProxyType[str, tuple[dict[str, Any], bool]] = MappingProxyType(
    {
        "preset paper": (dict(ParisConfig.presets["paper"]), False),
        "the paper's schedule, no mean": ({**_PAPER_OPTIONS, "center": False}, False),
        "the paper's schedule, mean of the first 512": (_PAPER_OPTIONS, True),
        "the paper's schedule, mean": (_PAPER_OPTIONS, False),
        "the paper's beta, rho 0.75": ({**_PAPER_OPTIONS, "schedule": _WIDE_SCHEDULE}, False),
        "the same, one tier": (
            {**_PAPER_OPTIONS, "schedule": _WIDE_SCHEDULE, "tiers": (1.0,)},
            False,
        ),
        "default": ({}, False),
    }
)
# Options, and whether estimates are corrected.
ALPHA: MappingProxyType[str, tuple[dict[str, Any], bool]] = MappingProxyType(
    {
        f"{name}{'' if corrected else ', alpha off'}": (VARIANTS[name][0], corrected)
        for name in ("preset paper", "default")
        for corrected in (True, False)
    }
)


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys ``[1, H, n, D]``, later queries ``[1, Hq, q, D]``, and how they are compared."""

    keys: torch.Tensor
    queries: torch.Tensor
    scale: float
    softcap: float | None = None


def drawn_keys(length: int, count: int, seed: int) -> Keys:
    """``length`` keys of one head, and ``count`` queries about some of them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def normalized(x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    total = length + count
    strong = torch.randperm(_DIM, generator=generator)[:_STRONG]
    mean, query_mean = 0.3 * draw(_DIM), 0.5 * draw(_GROUP, 1, _DIM)
    mean[strong] += 3 * draw(_STRONG).sign() * (1 + 0.5 * draw(_STRONG).abs())
    query_mean[..., strong] += 3 * draw(_GROUP, 1, _STRONG).sign()
    # Topics that change gradually, each much like the one before.
    topics = [draw(_DIM)]
    while len(topics) < total // _TOPIC_LEN + 2:
        topics.append(0.8 * topics[-1] + 0.6 * draw(_DIM))
    place = torch.arange(total) / _TOPIC_LEN
    topic = torch.stack(topics)
    share = (place - place.floor())[:, None]
    topic = topic[place.long()] * (1 - share) + topic[place.long() + 1] * share
    content = draw(total, _DIM)
    keys = normalized(mean + topic + content) * (0.5 * draw(_DIM)).exp()
    about = torch.randint(0, length, (_GROUP, count, 6), generator=generator)
    queries = 2 * content[about].mean(2) + topic[about[..., 0]] + 0.5 * topic[length:]
    queries = normalized(queries + query_mean + 0.7 * draw(_GROUP, count, _DIM))
    keys, queries = _turned(keys, 0)[None, None, :length], _turned(queries, length)[None]
    spread = (queries @ keys.mT).std(-1).mean()
    return Keys(keys, queries, 3.0 / float(spread))


def _turned(x: torch.Tensor, start: int) -> torch.Tensor:
    """RoPE of base 1e6 for ``x [..., n, D]`` at the positions from ``start`` on."""
    half = x.shape[-1] // 2
    angles = torch.arange(start, start + x.shape[-2])[:, None] * 1e6 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def recorded_keys(layer: RecordedLayer, length: int) -> Keys:
    """The first ``length`` keys of a layer, and the queries behind them."""
    keys, queries = layer.keys[None, :, :length], layer.queries[None, :, length:]
    return Keys(keys, queries, layer.scale, layer.softcap)


def judge(keys: Keys, options: ParisConfig, *, first_piece_only: bool) -> dict[str, float]:
    """Recall of the exact top-k by both stages and by each alone, and attention masses."""
    heads, length = keys.keys.shape[1:3]
    budget = options.budget(length)
    scores = exact_scores(keys.queries, keys.keys, keys.scale, keys.softcap)
    best = group_relevance(scores, heads).topk(budget, dim=-1).indices
    weights = scores.softmax(-1).view(heads, -1, *scores.shape[2:])
    every_key = ParisConfig(schedule=((math.inf, 1.0, 1.0),)).schedule
    candidates = ParisIndex(options).cost(length, budget).candidates

    def selected(options: ParisConfig, count: int) -> torch.Tensor:
        """``[H, q, n]`` bool."""
        index = ParisIndex(options)
        cold = _filled(index, keys, count, _PIECE if first_piece_only else length)
        ids = index.search(keys.queries, cold)[0].long()
        return torch.zeros(*ids.shape[:2], length, dtype=torch.bool).scatter_(-1, ids, True)

    def recall(marks: torch.Tensor) -> float:
        return float(marks.gather(-1, best[0]).float().mean())

    both = selected(options, budget)
    exact = torch.zeros_like(both).scatter_(-1, best[0], True)
    first = selected(options.replace(per_selected=1.0), candidates)
    return {
        "candidates": candidates / length,
        "first": recall(first),
        "second": recall(selected(options.replace(schedule=every_key), budget)),
        "recall": recall(both),
        "mass": float((weights * both[:, None]).sum(-1).mean()),
        "best_mass": float((weights * exact[:, None]).sum(-1).mean()),
    }


def products(keys: Keys, options: ParisConfig, *, corrected: bool) -> dict[str, float]:
    """How good the estimated inner products of all queries and keys are, mean key included.

    ``error``: relative, of the root of the squares; ``slope`` of the estimates over the exact ones,
    below 1 where they are too small; ``recall`` of the exact top-k where the estimates of all keys
    are ranked.
    """
    heads, length = keys.keys.shape[1:3]
    budget = options.budget(length)
    index = ParisIndex(options) if corrected else UncorrectedIndex(options)
    cold = _filled(index, keys, budget, length)
    estimates = index.estimate(keys.queries, cold).logits
    exact = exact_scores(keys.queries, keys.keys, keys.scale, keys.softcap)
    best, chosen = (
        group_relevance(logits, heads).topk(budget, dim=-1).indices for logits in (exact, estimates)
    )
    marks = torch.zeros(*best.shape[:3], length, dtype=torch.bool).scatter_(-1, chosen, True)
    squares = exact.square().sum()
    return {
        "error": float(((estimates - exact).square().sum() / squares).sqrt()),
        "slope": float((estimates * exact).sum() / squares),
        "recall": float(marks.gather(-1, best).float().mean()),
    }


def _filled(index: ParisIndex, keys: Keys, count: int, cut: int) -> ColdTokens:
    """All keys, added to ``index`` in a piece of ``cut`` tokens and one of the others."""
    store, length = PagedStore(DeviceMemory(keys.keys.device)), keys.keys.shape[2]
    for start in (0, cut):
        part = keys.keys[:, :, start : cut if start == 0 else length]
        if part.shape[2]:
            block = TokenBlock(part, part, start)
            index.add(block)
            store.append(block)
    valid = torch.ones(1, length, dtype=torch.bool)
    return ColdTokens(store, Scoring(valid, keys.scale, keys.softcap), count)


def _table(cells: CellResults) -> str:
    lines = [
        [cell["part"], str(cell["length"]), cell["variant"]]
        + [f"{fmean(one[name] for one in row['layers']):.3f}" for name in row["layers"][0]]
        for cell, row in cells
    ]
    names = ["candidates", "recall of stage 1", "of stage 2 alone", "of both", "mass", "best mass"]
    if cells[0][0]["part"].endswith("alpha"):
        names = ["relative error of the products", "slope", "recall"]
    return markdown_table(["keys", "tokens", "variant", *names], lines)


def _plot(path: Path, cells: CellResults) -> None:
    recalls = [
        (cell, {"overlap": fmean(layer["recall"] for layer in row["layers"])})
        for cell, row in cells
    ]
    bars_of("share of the exact top-k that is selected", wrapped=True)(path, recalls)


@dataclass(frozen=True, kw_only=True)
class ParisStages(Ablation):
    """Recall of ParisKV's stages by length, mean, candidates and tiers, on real and drawn keys."""

    name = "paris-stages"
    method = "paris"
    example = "subspace_dim=4"
    described = ("queries",)
    tables = MappingProxyType(dict.fromkeys(PARTS, _table))
    plots = MappingProxyType(dict.fromkeys(PARTS, _plot))
    smallest = "--model needle --context 600 --top-k 20 --queries 8"

    caches: str | None = caches_option("paris")
    top_k: int | float = budget_option(0.03)
    parts: tuple[str, ...] = parts_option(PARTS)
    windows: int = not_here(1)
    new_tokens: int = not_here()
    step: int = not_here(1)
    queries: int = count_option(16, "that come after the keys, evenly among the next 16 x as many")
    _read: dict[int, list[RecordedLayer]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def variants(self, part: str) -> Sequence[str]:
        return list(ALPHA if part.endswith("alpha") else VARIANTS)

    def following(self, part: str) -> int:
        return 16 * self.queries

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        assert isinstance(choice.options, ParisConfig)
        of_products = cell["part"].endswith("alpha")
        changes, flag = (ALPHA if of_products else VARIANTS)[cell["variant"]]
        options = choice.options.replace(**{**changes, "top_k": choice.options.top_k})
        results = [
            products(keys, options, corrected=flag)
            if of_products
            else judge(keys, options, first_piece_only=flag)
            for keys in tqdm(self._keys(cell, subject), desc="layers", leave=False)
        ]
        return {"layers": results}

    def _keys(self, cell: Cell, subject: Subject) -> list[Keys]:
        length = cell["length"]
        if cell["part"].startswith("drawn"):
            return [drawn_keys(length, self.queries, self.seed + n) for n in range(2)]
        if length not in self._read:
            self._read.clear()
            (text,) = self.contexts(subject, "model", length)
            self._read[length] = read_layers(subject.model, text)
        found = (recorded_keys(layer, length) for layer in self._read[length])
        return [Keys(k.keys, k.queries[:, :, ::16], k.scale, k.softcap) for k in found]


MEASUREMENT = ParisStages

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
