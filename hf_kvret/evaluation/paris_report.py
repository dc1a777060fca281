"""The tables and pictures of ``paris-ablation``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_kvret.evaluation.plots import part_pictures, plot_groups, plot_lines
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.stretches import mean_of, share
from hf_kvret.evaluation.tables import markdown_table


def ablation_tables(results: Results) -> str:
    """A markdown table for each part that was run."""
    tables = [_table(results, part) for part in ("switches", "ratios")]
    rows = [
        (
            cell["cache"],
            cell["variant"],
            str(cell["length"]),
            *_ends(found["stretches"], "overlap"),
            *_ends(found["stretches"], "mass"),
        )
        for cell, found in results
        if cell["part"] == "drift"
    ]
    if rows:
        kinds = ("recall, first", "last", "mean", "mass, first", "last", "mean")
        tables.append(markdown_table(("cache", "drift", "context", *kinds), rows))
    return "\n\n".join(table for table in tables if table)


def ablation_pictures(path: Path) -> list[Path]:
    """The pictures that ``plot_ablation`` writes where all parts were run."""
    return list(part_pictures(path, _PLOTS).values())


def plot_ablation(path: Path, results: Results) -> None:
    """A picture for each part that was run: ``path``, then ``NAME-PART`` beside it."""
    used = [part for part in _PLOTS if any(cell["part"] == part for cell, _ in results)]
    for part, own in part_pictures(path, used).items():
        _PLOTS[part](own, results)


def _ends(stretches: list[dict[str, Any]], name: str) -> tuple[str, str, str]:
    return (
        share(stretches[0][name]),
        share(stretches[-1][name]),
        share(mean_of(stretches, name)),
    )


def _of(results: Results, part: str) -> list[tuple[Cell, dict[str, Any]]]:
    return [(cell, found) for cell, found in results if cell["part"] == part]


def _table(results: Results, part: str) -> str:
    """A row a variant, recall and mass of the best at each length; empty where nothing was run."""
    known = {
        (cell["cache"], cell["variant"], cell["length"]): found
        for cell, found in _of(results, part)
    }
    if not known:
        return ""
    lengths = sorted({length for _, _, length in known})
    rows = []
    for cache, variant in dict.fromkeys((cache, variant) for cache, variant, _ in known):
        row = [cache, variant]
        for length in lengths:
            found = known.get((cache, variant, length))
            if found is None:
                row += ["-"] * 3
                continue
            mass = f"{found['mass']:.3f} of {found['best_mass']:.3f}"
            row += [share(found["overlap"]), mass, f"{found['candidate_ratio']:.1%}"]
        rows.append(row)
    kinds = ("recall", "mass", "candidates")
    columns = [f"{kind}, {length}" for length in lengths for kind in kinds]
    title = {"switches": "variant", "ratios": "candidate ratio"}[part]
    return markdown_table(["cache", title, *columns], rows)


def _plot_ratios(path: Path, results: Results) -> None:
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for cell, found in sorted(_of(results, "ratios"), key=lambda one: float(one[0]["variant"])):
        xs, ys = lines.setdefault(f"{cell['cache']}, {cell['length']}", ([], []))
        xs.append(found["candidate_ratio"])
        ys.append(found["overlap"])
    plot_lines(path, lines, title="candidates needed", x="candidates, share of cold", y="recall")


def _plot_switches(path: Path, results: Results) -> None:
    cells = _of(results, "switches")
    groups = list(dict.fromkeys(cell["variant"] for cell, _ in cells))
    bars: dict[str, list[float | None]] = {}
    for cell, found in cells:
        heights = bars.setdefault(f"{cell['cache']}, {cell['length']}", [None] * len(groups))
        heights[groups.index(cell["variant"])] = found["overlap"]
    plot_groups(path, groups, bars, title="ParisKV, one part off at a time", y="recall")


def _plot_drift(path: Path, results: Results) -> None:
    cells = _of(results, "drift")
    several = len({cell["cache"] for cell, _ in cells}) > 1
    lines = {
        f"{cell['cache']}: {cell['variant']}" if several else cell["variant"]: (
            [stretch["end"] for stretch in found["stretches"]],
            [stretch["overlap"] for stretch in found["stretches"]],
        )
        for cell, found in cells
    }
    plot_lines(path, lines, title="recall along a text", x="generated tokens", y="recall")


_PLOTS = {"ratios": _plot_ratios, "switches": _plot_switches, "drift": _plot_drift}
