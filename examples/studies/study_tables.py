"""Tables and pictures that several studies have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_kvret.lab.report.plots import plot_groups, plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import markdown_table, share

Found = list[tuple[Cell, dict[str, Any]]]
"""Cells with their results."""
Table = Callable[[Found], str]
Plot = Callable[[Path, Found], None]
Lines = Mapping[str, Mapping[int, float]]
"""Numbers by name and layer."""

SHOWN: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "recall": lambda found: share(found["overlap"]),
    "mass": lambda found: f"{found['mass']:.3f} of {found['best_mass']:.3f}",
    "tokens equal": lambda found: share(found["equal"]),
    "candidates": lambda found: f"{found['candidate_ratio']:.1%}",
    "rows read": lambda found: f"{found['read_ratio']:.1%}",
    "candidates / read": lambda found: f"{found['rerank_ratio']:.1f}",
}
"""How a column shows a result of ``Follower``."""

CANDIDATES = ("candidate_ratio", "candidates, share of cold"), ("overlap", "recall")
"""For ``curves_of``."""


def of_part(results: Results, part: str) -> Found:
    """The cells of a part with their results; those without one are of the part ``""``."""
    return [(cell, found) for cell, found in results if cell.get("part", "") == part]


def by_length(
    cells: Found, kinds: Sequence[str]
) -> tuple[list[str], dict[tuple[str, str], list[str]]]:
    """Columns ``KIND, LENGTH`` of ``SHOWN``, and what stands in them by cache and variant."""
    known = {(cell["cache"], cell["variant"], cell["length"]): found for cell, found in cells}
    lengths = sorted({length for _, _, length in known})
    rows: dict[tuple[str, str], list[str]] = {}
    for cache, variant in dict.fromkeys((cache, variant) for cache, variant, _ in known):
        row = rows.setdefault((cache, variant), [])
        for length in lengths:
            found = known.get((cache, variant, length))
            row += ["-" if found is None else SHOWN[kind](found) for kind in kinds]
    return [f"{kind}, {length}" for length in lengths for kind in kinds], rows


def shown(value: float | None, form: str) -> str:
    """A number for a table, ``-`` for None."""
    return "-" if value is None else format(value, form)


def layers_table(title: str, lines: Lines, form: str = ".3f") -> str:
    """A row a layer, a column for each of ``lines``, and their means."""
    layers = sorted({layer for known in lines.values() for layer in known})
    rows = [
        [str(layer), *(shown(known.get(layer), form) for known in lines.values())]
        for layer in layers
    ]
    means = [fmean(known.values()) if known else None for known in lines.values()]
    rows.append(["mean", *(shown(mean, form) for mean in means)])
    return markdown_table([title, *lines], rows)


def layers_of(lines: Callable[[Found], Lines], title: str, y: str, **bounds: float) -> Plot:
    """A picture: lines over layers; ``bounds`` are ``low`` and ``high`` of y."""

    def plot(path: Path, cells: Found) -> None:
        drawn = {name: (list(known), list(known.values())) for name, known in lines(cells).items()}
        plot_lines(path, drawn, title=title, x="layer", y=y, whole_x=True, **bounds)

    return plot


def bars_of(title: str, *, wrapped: bool = False) -> Plot:
    """A picture: recall by variant, a colour for each cache and length.

    ``wrapped`` is for long names of neighbours, which would run into each other.
    """

    def plot(path: Path, cells: Found) -> None:
        groups = list(dict.fromkeys(cell["variant"] for cell, _ in cells))
        bars: dict[str, list[float | None]] = {}
        for cell, found in cells:
            heights = bars.setdefault(f"{cell['cache']}, {cell['length']}", [None] * len(groups))
            heights[groups.index(cell["variant"])] = found["overlap"]
        labels = [name.replace(", ", ",\n") if wrapped else name for name in groups]
        plot_groups(path, labels, bars, title=title, y="recall")

    return plot


def curves_of(title: str, x: tuple[str, str], y: tuple[str, str], *, whole: bool = False) -> Plot:
    """A picture: one number of a result over another, a line for what the variants begin with.

    ``x`` and ``y`` are each a number's name and its label; ``whole`` draws one line for all
    variants, which are numbers.
    """
    names = (x[0], y[0])

    def place(one: tuple[Cell, dict[str, Any]]) -> float:
        return float(one[0]["variant"] if whole else one[1][names[0]])

    def plot(path: Path, cells: Found) -> None:
        lines: dict[str, tuple[list[float], list[float]]] = {}
        several = len({(cell["cache"], cell["length"]) for cell, _ in cells}) > 1
        for cell, found in sorted(cells, key=place):
            home, name = f"{cell['cache']}, {cell['length']}", cell["variant"].split(", ")[0]
            line = home if whole else f"{home}: {name}" if several else name
            for values, number in zip(lines.setdefault(line, ([], [])), names, strict=True):
                values.append(found[number])
        plot_lines(path, lines, title=title, x=x[1], y=y[1])

    return plot


def stretches_of(
    title: str, *, x: str, name: str = "overlap", numbered: bool = False, **bounds: float
) -> Plot:
    """A picture: recall of each stretch over its end, or its number; a line a variant."""

    def plot(path: Path, cells: Found) -> None:
        several = len({cell["cache"] for cell, _ in cells}) > 1
        lines = {}
        for cell, found in cells:
            label = f"{cell['cache']}: {cell['variant']}" if several else cell["variant"]
            known = [
                (number if numbered else one["end"], one[name])
                for number, one in enumerate(found["stretches"], start=1)
                if one[name] is not None
            ]
            lines[label] = ([end for end, _ in known], [value for _, value in known])
        plot_lines(path, lines, title=title, x=x, y="recall", **bounds)

    return plot
