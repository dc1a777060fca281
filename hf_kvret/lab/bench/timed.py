"""Set-up, rows of timed calls, and tables of them, for benches without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hf_kvret.lab.bench.timing import quartiles
from hf_kvret.lab.evaluate.measurement import Measurement, Row
from hf_kvret.lab.report.environment import describe_environment
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table

Text = Callable[[Cell, Row], str]
"""Gives the text of a column, from a cell and its row."""

Column = tuple[str, Text]
"""A header, and the text below it."""

# One of these entries of a row says why it has no numbers.
_REASONS = ("out_of_memory", "check_failed", "skipped")


def describe(measurement: Measurement, *options: str, machine: Sequence[str]) -> Row:
    """For a set-up: the values of ``options``, and what the environment says of ``machine``."""
    here = describe_environment()
    return {name: getattr(measurement, name) for name in options} | {
        name: here[name] for name in machine
    }


def calls_row(seconds: Sequence[float]) -> Row:
    """``seconds``, the median, with quartiles and the least, of ``timed`` calls."""
    low, middle, high = quartiles(seconds)
    return {
        "seconds": middle,
        "seconds_quartiles": [low, high],
        "seconds_least": min(seconds),
        "timed": len(seconds),
    }


def rows_table(
    columns: Sequence[Column], rows: Iterable[tuple[Cell, Row]], lead: int, before: str
) -> str:
    """A line for each row below the text ``before``.

    A row without numbers has its reason behind the first ``lead`` columns, which need cells alone.
    """
    lines = []
    for cell, row in rows:
        reason = next((row[name] for name in _REASONS if name in row), None)
        line = [text(cell, row) for _, text in (columns if reason is None else columns[:lead])]
        if reason is not None:
            line += [reason, *[""] * (len(columns) - lead - 1)]
        lines.append(line)
    return f"{before}\n\n{markdown_table([header for header, _ in columns], lines)}"


def series(
    points: Iterable[tuple[str, float, float]],
) -> dict[str, tuple[list[float], list[float]]]:
    """Lines for ``plot_lines`` of points ``(name, x, y)``."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for name, x, y in points:
        xs, ys = lines.setdefault(name, ([], []))
        xs.append(x)
        ys.append(y)
    return lines


def ms(seconds: float) -> str:
    """Milliseconds: three digits of them, and all of more than a second."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def spread(row: Row, text: Callable[[float], str] = ms) -> str:
    """The quartiles of ``calls_row``."""
    low, high = row["seconds_quartiles"]
    return f"{text(low)} to {text(high)}" if row["timed"] > 1 else "once"


def thread_count(count: int) -> str:
    """A number of threads in words."""
    return "1 thread" if count == 1 else f"{count} threads"
