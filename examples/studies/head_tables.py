"""Tables and pictures of what query heads lose that select together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from study_tables import Found, Plot, Table, shown

from hf_kvret.evaluation.plots import plot_lines
from hf_kvret.evaluation.tables import markdown_table

_OF = {
    "selection": ("rows a selection", "union", "in all"),
    "union": ("rows in all", "rows", "a selection"),
}


def _heads(size: int, selections: int) -> str:
    return f"{size} (all)" if selections == 1 and size > 1 else str(size)


def _mass_table(cells: Found) -> str:
    """For equal rows a selection, then for equal rows of the union: a row for each way."""
    tables = []
    for of, (title, other, note) in _OF.items():
        rows: dict[tuple[str, ...], dict[int, str]] = {}
        counts = sorted({one["count"] for _, found in cells for one in found["selections"]})
        for cell, found in cells:
            for one in (one for one in found["selections"] if one["of"] == of):
                heads = _heads(one["select_heads"], one["selections"])
                pooling = one["pooling"] if one["select_heads"] > 1 else "-"
                key = (str(cell["length"]), cell["variant"], heads, pooling)
                text = f"{one['mass']:.3f}, {one['worst']:.3f}; {one[other]:.0f} {note}"
                rows.setdefault(key, {})[one["count"]] = text
        header = ["context", "heads", "heads a selection", "weights pooled"]
        header += [f"{count} {title}: mass, worst head" for count in counts]
        lines = [[*key, *(row.get(count, "-") for count in counts)] for key, row in rows.items()]
        tables.append(markdown_table(header, lines))
    return "\n\n".join(tables)


def _by_way(cells: Found) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Results by cache, length and heads a selection, with ascending rows."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell, result in cells:
        size = int(cell["variant"].split(", ")[0])
        key = (cell["cache"], str(cell["length"]), _heads(size, result["selections"]))
        found.setdefault(key, []).append(result)
    return {key: sorted(own, key=lambda one: one["rows"]) for key, own in found.items()}


def _tokens_table(cells: Found) -> str:
    """A row for each number of rows a selection, then divergences at equal rows of the union."""
    known, rows = _by_way(cells), []
    for key, own in known.items():
        for one in own:
            shares = (f"{one[name]:.3f}" for name in ("mass", "worst", "equal"))
            loss = one["loss"] - one["full_loss"]
            numbers = (f"{one['rows']:.0f}", f"{one['union']:.0f}", f"{one['kl']:.4f}")
            rows.append([*key, *numbers, *shares, f"{loss:+.4f}"])
    named = ["cache", "context", "heads a selection"]
    header = [*named, "rows", "union", "KL", "mass", "worst head", "tokens equal", "loss - full's"]
    unions = [
        count
        for count in (2**power for power in range(5, 13))
        if any(at(own, "union", "kl", count) is not None for own in known.values())
    ]
    lines = [
        [*key, *(shown(at(own, "union", "kl", count), ".4f") for count in unions)]
        for key, own in known.items()
    ]
    asked = [f"KL at {count} rows in all" for count in unions]
    table = markdown_table(header, rows)
    return f"{table}\n\n{markdown_table([*named, *asked], lines)}" if unions else table


def at(found: list[dict[str, Any]], x: str, y: str, place: float) -> float | None:
    """``y`` where ``x`` is ``place``, between measured points, both logarithmic; else None."""
    points = sorted((one[x], one[y]) for one in found)
    for (low, first), (high, second) in pairwise(points):
        if low <= place <= high and min(first, second) > 0:
            part = math.log(place / low) / math.log(high / low)
            return math.exp((1 - part) * math.log(first) + part * math.log(second))
    return None


def _lines(x: str, label: str) -> Plot:
    def plot(path: Path, cells: Found) -> None:
        lines = {
            f"{cache}, {length}: {heads}": ([one[x] for one in own], [one["kl"] for one in own])
            for (cache, length, heads), own in _by_way(cells).items()
        }
        title = "divergence from full attention, by query heads a selection"
        plot_lines(path, lines, title=title, x=label, y="KL, nats", log_x=True, log_y=True)

    return plot


TABLES: Mapping[str, Table] = {"mass": _mass_table, "tokens": _tokens_table}
PLOTS: Mapping[str, Plot] = {
    "tokens": _lines("union", "different rows of all selections"),
    "rows": _lines("rows", "rows a selection"),
}
DRAWN: Mapping[str, str] = {"rows": "tokens"}
