"""The tables and pictures of ``ctkvr-ablation``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_kvret.evaluation.plots import part_pictures, plot_groups, plot_lines
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.stretches import mean_of, share
from hf_kvret.evaluation.tables import markdown_table

# Parts with one number a variant, and what their variants are.
_PLAIN = {
    "choice": "centroids",
    "centroids": "C, centroids",
    "probes": "C', recalled centroids",
    "rerank": "rerank",
    "budget": "budget",
    "questions": "question's centroids",
}
# The paper's accuracies, of other models on other tasks: where, and by variant.
_PAPER: dict[str, tuple[str, dict[str, str]]] = {
    "choice": ("table 4", {"last": "83.35", "random": "79.93", "first": "75.60", "even": "81.98"}),
    "probes": ("table 15", {"2": "0.8854", "4": "0.8958", "6": "0.8988", "8": "0.8990"}),
    "budget": ("tables 1 and 6", {"512": "84.70", "1024": "85.25", "0.04": "85.58"}),
}
_PLACES = {"prompt_recall": "of the prompt", "generated_recall": "that were generated"}
Found = list[tuple[Cell, dict[str, Any]]]


def ablation_tables(results: Results) -> str:
    """A markdown table for each part that was run; two for ``pending``."""
    tables = [_plain_table(_of(results, part), part) for part in _PLAIN if _of(results, part)]
    if update := _of(results, "update"):
        tables.append(_turns_table(update))
    if pending := _of(results, "pending"):
        tables += [_long_table(pending, name) for name in _PLACES]
    return "\n\n".join(tables)


def ablation_pictures(path: Path) -> list[Path]:
    """The pictures that ``plot_ablation`` writes where all parts were run."""
    return list(part_pictures(path, _PLOTS).values())


def plot_ablation(path: Path, results: Results) -> None:
    """A picture for each part that was run: ``path``, then ``NAME-PART`` beside it."""
    used = [name for name, (part, _) in _PLOTS.items() if _of(results, part)]
    for name, own in part_pictures(path, used).items():
        part, plot = _PLOTS[name]
        plot(own, _of(results, part))


def _of(results: Results, part: str) -> Found:
    return [(cell, found) for cell, found in results if cell["part"] == part]


def _plain_table(cells: Found, part: str) -> str:
    """A row a variant, columns for each length."""
    known = {(cell["cache"], cell["variant"], cell["length"]): found for cell, found in cells}
    lengths = sorted({length for _, _, length in known})
    source, figures = _PAPER.get(part, ("", {}))
    kinds = ["recall", "mass", "tokens equal", "candidates", "rows read"]
    kinds += ["candidates / read"] if part == "rerank" else []
    rows = []
    for cache, variant in dict.fromkeys((cache, variant) for cache, variant, _ in known):
        row = [cache, variant]
        for length in lengths:
            found = known.get((cache, variant, length))
            row += ["-"] * len(kinds) if found is None else _numbers(found)[: len(kinds)]
        rows.append([*row, figures.get(variant, "-")] if figures else row)
    columns = [f"{kind}, {length}" for length in lengths for kind in kinds]
    paper = [f"paper's accuracy, {source}"] if figures else []
    return markdown_table(["cache", _PLAIN[part], *columns, *paper], rows)


def _numbers(found: dict[str, Any]) -> list[str]:
    return [
        share(found["overlap"]),
        f"{found['mass']:.3f} of {found['best_mass']:.3f}",
        share(found["equal"]),
        f"{found['candidate_ratio']:.1%}",
        f"{found['read_ratio']:.1%}",
        f"{found['rerank_ratio']:.1f}",
    ]


def _turns_table(cells: Found) -> str:
    """Recall by turn (the paper's table 5)."""
    most = max(len(found["stretches"]) for _, found in cells)
    rows = []
    for cell, found in cells:
        turns = [share(one["overlap"]) for one in found["stretches"]]
        turns += ["-"] * (most - len(turns))
        mass = f"{found['mass']:.3f} of {found['best_mass']:.3f}"
        means = (share(found["overlap"]), mass, share(found["equal"]), str(found["list_builds"]))
        rows.append([cell["cache"], cell["variant"], str(cell["length"]), *turns, *means])
    turns = [f"turn {number + 1}" for number in range(most)]
    names = ("recall, mean", "mass, mean", "tokens equal", "times lists were made")
    return markdown_table(["cache", "update", "context", *turns, *names], rows)


def _long_table(cells: Found, name: str) -> str:
    """Recall along the generation, of tokens in one place."""
    ends = sorted({one["end"] for _, found in cells for one in found["stretches"]})
    rows = []
    for cell, found in cells:
        known = {one["end"]: share(one[name]) for one in found["stretches"]}
        row = [cell["cache"], cell["variant"], str(cell["length"])]
        row += [known.get(end, "-") for end in ends]
        rows.append([*row, share(mean_of(found["stretches"], name)), str(found["list_builds"])])
    title = f"recall of tokens {_PLACES[name]}"
    columns = (f"to {end}" for end in ends)
    return markdown_table(
        ["cache", title, "context", *columns, "mean", "times lists were made"], rows
    )


def _plot_bars(path: Path, cells: Found) -> None:
    groups = list(dict.fromkeys(cell["variant"] for cell, _ in cells))
    bars: dict[str, list[float | None]] = {}
    for cell, found in cells:
        heights = bars.setdefault(f"{cell['cache']}, {cell['length']}", [None] * len(groups))
        heights[groups.index(cell["variant"])] = found["overlap"]
    title = f"CTkvr: {_PLAIN[cells[0][0]['part']]}"
    plot_groups(path, groups, bars, title=title, y="recall")


def _plot_ratios(path: Path, cells: Found) -> None:
    """Recall over candidates, a line for each way to compare them."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    several = len({(cell["cache"], cell["length"]) for cell, _ in cells}) > 1
    for cell, found in sorted(cells, key=lambda one: float(one[1]["candidate_ratio"])):
        name = cell["variant"].split(", ")[0]
        name = f"{cell['cache']}, {cell['length']}: {name}" if several else name
        xs, ys = lines.setdefault(name, ([], []))
        xs.append(found["candidate_ratio"])
        ys.append(found["overlap"])
    x = "candidates, share of cold"
    plot_lines(path, lines, title="CTkvr: how recalled tokens are compared", x=x, y="recall")


def _plot_turns(path: Path, cells: Found) -> None:
    lines = {
        name: (list(range(1, len(stretches) + 1)), [one["overlap"] for one in stretches])
        for name, stretches in _named(cells)
    }
    plot_lines(path, lines, title="CTkvr: new centroids over turns", x="turn", y="recall")


def _plot_prompt(path: Path, cells: Found) -> None:
    _plot_long(path, cells, "prompt_recall")


def _plot_generated(path: Path, cells: Found) -> None:
    _plot_long(path, cells, "generated_recall")


def _plot_long(path: Path, cells: Found, name: str) -> None:
    lines = {
        label: (
            [one["end"] for one in stretches if one[name] is not None],
            [one[name] for one in stretches if one[name] is not None],
        )
        for label, stretches in _named(cells)
    }
    title = f"CTkvr: tokens {_PLACES[name]}"
    plot_lines(path, lines, title=title, x="tokens after the prompt", y="recall", low=-0.03)


def _named(cells: Found) -> list[tuple[str, list[dict[str, Any]]]]:
    several = len({cell["cache"] for cell, _ in cells}) > 1
    return [
        (f"{cell['cache']}: {cell['variant']}" if several else cell["variant"], found["stretches"])
        for cell, found in cells
    ]


_PLOTS: dict[str, tuple[str, Callable[[Path, Found], None]]] = {
    **{part: (part, _plot_bars) for part in _PLAIN},
    "rerank": ("rerank", _plot_ratios),
    "update": ("update", _plot_turns),
    "pending": ("pending", _plot_prompt),
    "generated": ("pending", _plot_generated),
}
