"""What it gives that the cold tokens which a query does not select count as one more token: how far
a cache's logits are from full attention's on its way through a text, at equal rows read.

    python examples/studies/rest_tokens.py --text wiki.test.raw --json rest.json --plot rest.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from ablation import CellResults, values_option
from distances import NOTHING_COLD, DistanceStudy, Logits, cache_of, distance, follow

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.program.arguments import number
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.observe.counters import counters_of
from hf_kvret.observe.recall import recalls_of

OFF = "nothing"
"""What stands for unselected tokens where nothing does."""


def rest_options(name: str) -> dict[str, Any]:
    """Options of a cache for what stands for unselected tokens, as ``--rests`` names it."""
    if name.isdigit():
        return {"rest": "mean", "rest_blocks": int(name)}
    return {"rest": None if name == OFF else name, "rest_blocks": None}


def _known(name: str) -> str:
    if name not in (OFF, "mean") and not (name.isdigit() and int(name)):
        raise argparse.ArgumentTypeError(
            f"{name!r}: choose {OFF}, mean, or tokens of a mean, as 512"
        )
    return name


def follow_all(
    readers: Sequence[Reader], windows: Sequence[torch.Tensor], step: int, **changes: Any
) -> dict[str, Any]:
    """Go on from contexts to the ends of their windows; plain JSON values.

    As of ``distance``; ``lost`` is the share of the attention on cold tokens that selections miss,
    exactly; ``rows`` the share of cold rows that are read. ``step_bytes`` and ``full_bytes`` are
    means of ``Usage``'s, at the ends.

    Raises:
        ValueError: nothing was cold.
    """
    places: list[Logits] = []
    lost, rows, usages = [], [], []
    for start, window in zip(readers, windows, strict=True):
        reader, logits = follow(start, window, step, **changes, track_recall=True)
        places.append(logits)
        usages.append(reader.usage())
        assert isinstance(reader.cache, RetrievalCache)
        for layer in reader.cache.retrieval_layers:
            lost += [1.0 - one.mass for one in recalls_of(layer)]
            if layer.selected:
                rows.append(layer.selected / counters_of(layer).cold_rows)
    if not lost:
        raise ValueError(NOTHING_COLD)
    return distance(places) | {
        "lost": fmean(lost),
        "rows": fmean(rows),
        "step_bytes": fmean(usage.step_bytes for usage in usages),
        "full_bytes": fmean(usage.full_bytes for usage in usages),
    }


def _by_way(cells: CellResults) -> dict[tuple[str, str, str], dict[float, dict[str, Any]]]:
    """Results by cache, length and what stands for unselected tokens, then by share of rows."""
    ways: dict[tuple[str, str, str], dict[float, dict[str, Any]]] = {}
    for cell, result in cells:
        share, rest = cell["variant"].split(", ")
        key = cell["cache"], str(cell["length"]), rest
        ways.setdefault(key, {})[float(share)] = result
    return ways


def _table(cells: CellResults) -> str:
    """Divergences, then the mass that selections miss."""
    ways = _by_way(cells)
    shares = sorted({share for results in ways.values() for share in results})
    lines = [
        [*way, *(_divergence(results.get(share)) for share in shares)]
        for way, results in ways.items()
    ]
    lost = [
        [*way[:2], *(f"{results[share]['lost']:.3f}" for share in shares)]
        for way, results in ways.items()
        if len(results) == len(shares) and way[2] == next(iter(ways))[2]
    ]
    header = ["cache", "context", "for the rest"]
    header += [f"{share:.0%}: KL +- s.e., equal" for share in shares]
    table = markdown_table(header, lines)
    head = ["cache", "context", *(f"{share:.0%}: mass of the cold ones lost" for share in shares)]
    return f"{table}\n\n{markdown_table(head, lost)}" if lost else table


def _divergence(one: dict[str, Any] | None) -> str:
    if one is None:
        return "-"
    return f"{one['kl']:.3g} +- {one['kl_error']:.1g}, {one['equal']:.1%}"


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Names without what follows the first colon, where that still tells them apart."""
    short = {name: name.partition(":")[0] for name in names}
    counts = [*short.values()]
    return {name: name if counts.count(one) > 1 else one for name, one in short.items()}


def _plot(path: Path, cells: CellResults) -> None:
    """Of the longest context."""
    ways = _by_way(cells)
    longest = max((length for _, length, _ in ways), key=int)
    ways = {way: results for way, results in ways.items() if way[1] == longest}
    caches = _short_names(list(dict.fromkeys(cache for cache, _, _ in ways)))
    lines, kinds = {}, []
    for (cache, _, rest), results in ways.items():
        points = [results[share] for share in sorted(results)]
        kinds.append((caches[cache], rest))
        lines[", ".join(kinds[-1])] = (
            [one["step_bytes"] / one["full_bytes"] for one in points],
            [one["kl"] for one in points],
        )
    plot_lines(
        path,
        lines,
        title=f"divergence from full attention, {int(longest):,} tokens of context",
        x="bytes that a step reads, share of full attention's",
        y="KL, nats",
        log_x=True,
        log_y=True,
        kinds=kinds,
    )


@dataclass(frozen=True, kw_only=True)
class MeanTokens(DistanceStudy):
    """What it gives that tokens which are not selected count."""

    name = "rest-tokens"
    others = ("paris", "lrqk", "ctkvr", "a2ats")
    chosen = ("rest", "rest_blocks", "top_k")
    instead = ": --rests and --shares name them"
    tables = MappingProxyType({"tokens": _table})
    plots = MappingProxyType({"tokens": _plot})
    smallest = (
        "--model needle --context 512 --windows 1 --new-tokens 32 --shares 0.05 "
        "--rests nothing,mean,64 --caches flat:recent=16:flush=16"
    )

    model: str = option("reference", "a folder, a hub id, or a model of ours")
    rests: tuple[str, ...] = values_option(
        (OFF, "mean", "512"),
        "what stands for unselected tokens: nothing, mean, or cold tokens of a mean",
        _known,
    )
    shares: tuple[float, ...] = values_option(
        (0.01, 0.03, 0.06, 0.12), "rows read, as shares of the cold ones", number(0.0, 1.0)
    )

    def variants(self, part: str) -> Sequence[str]:
        return [f"{share:g}, {rest}" for share in self.shares for rest in self.rests]

    def run(self, cell: Cell, subject: Subject, choice: CacheChoice) -> dict[str, Any]:
        windows = self.contexts(subject, cell["part"], cell["length"])
        cache, options = cache_of(subject, choice)
        share, rest = cell["variant"].split(", ")
        if cell["cache"].startswith("ctkvr"):
            # The lists of CTkvr are as long as its budget wants them.
            options = options.replace(top_k=float(share))
        readers = self.read(subject, cell, cache, options, windows)
        changes = {"top_k": float(share), **rest_options(rest)}
        return follow_all(readers, windows, self.step, **changes)


MEASUREMENT = MeanTokens

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
