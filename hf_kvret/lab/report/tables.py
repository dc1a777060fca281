"""Results as markdown tables, and numbers as they stand in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hf_kvret.lab.report.results import Cell, Results, why_missing
from hf_kvret.saved.identity import printable

Columns = Mapping[str, Callable[[Cell, dict[str, Any]], str]]
"""By header, what stands in a column: a function of cell and row. A blank at the end
keeps headers apart that read alike."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table with aligned columns; a bar, a line break and the like are spelled out."""
    header, *rows = ([printable(x).replace("|", "\\|") for x in row] for row in (header, *rows))
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def table_of(
    results: Iterable[tuple[Cell, dict[str, Any]]], columns: Columns, lead: int = 1
) -> str:
    """A line for each cell, with what ``columns`` make of it and its row.

    A row without numbers has its reason behind the first ``lead`` columns, which need cells alone.
    """
    lines, texts = [], list(columns.values())
    for cell, row in results:
        why = why_missing(row)
        line = [text(cell, row) for text in (texts if why is None else texts[:lead])]
        if why is not None:
            line += [why, *[""] * (len(texts) - lead - 1)]
        lines.append(line)
    return markdown_table([name.rstrip() for name in columns], lines)


def with_step(table: str, results: Results) -> str:
    """The table, and below it how many tokens came together where that was not one, as usual."""
    step = results.setup.get("step", 1)
    return table if step == 1 else f"{table}\n\n{step} tokens a forward pass, not one."


def mean_or_dash(values: Sequence[float], form: str, times: int = 1) -> str:
    """The mean of numbers, ``times`` that many, in ``form``; ``-`` where there are none."""
    return format(times * sum(values) / len(values), form) if values else "-"


def share(value: float | None) -> str:
    """A share with three digits, ``-`` for None."""
    return or_dash(value, ".3f")


def or_dash(value: float | None, form: str, times: int = 1) -> str:
    """A number, ``times`` that many, in ``form``; ``-`` for None."""
    return "-" if value is None else format(times * value, form)


def held(*rows: dict[str, Any]) -> str:
    """Bytes that a cache holds over those of uncompressed keys and values, the mean over rows."""
    counted = (row for row in rows if "device_bytes" in row)
    shares = [(row["device_bytes"] + row["host_bytes"]) / row["full_bytes"] for row in counted]
    return mean_or_dash(shares, ".1%")


def over_full(results: Results, cell: Cell, row: dict[str, Any], name: str) -> float | None:
    """How far a number is above full attention's in the same cell; None where one is missing."""
    full = (results.find(cell | {"cache": "full"}) or {}).get(name)
    return None if full is None or row[name] is None else row[name] - full
