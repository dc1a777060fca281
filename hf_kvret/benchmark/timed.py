"""What benches without a model share: their set-up, rows of timed calls, and tables of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch

from hf_kvret.benchmark.limits import available_host_memory
from hf_kvret.benchmark.timing import quartiles
from hf_kvret.evaluation.environment import describe_environment
from hf_kvret.evaluation.measurement import CheckFailed, Measurement, Row
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.tables import markdown_table

Column = tuple[str, Callable[[Cell, Row], str]]
"""A header, and what stands below it for a cell and its row."""

# Why a row has no numbers.
_REASONS = ("out_of_memory", "check_failed", "skipped")


class TimedTogether(Measurement):
    """Cells that differ in nothing but their cache are one size, and are timed in turns.

    So all of a size are measured where one of them waits.
    """

    def waiting(self, results: Results) -> list[Cell]:
        sizes = [size_of(cell) for cell in super().waiting(results)]
        return [cell for cell in self.cells() if size_of(cell) in sizes]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """A size after the other."""
        for _, group in groupby(self.waiting(results), key=size_of):
            yield list(group)


def size_of(cell: Cell) -> Cell:
    """A cell without its cache."""
    return {name: value for name, value in cell.items() if name != "cache"}


def describe(measurement: Measurement, *options: str, machine: Sequence[str]) -> Row:
    """For a set-up: the values of ``options``, and what the environment says of ``machine``."""
    here = describe_environment()
    return {name: getattr(measurement, name) for name in options} | {
        name: here[name] for name in machine
    }


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside, torch runs on ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_host_memory(needed: int) -> None:
    """MemoryError where less is free: a host that runs out has its processes killed."""
    free = available_host_memory()
    if needed > free:
        raise MemoryError(f"predicted: {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free")


def check_ways(
    run: Callable[[str], Any],
    ways: Iterable[str],
    reference: str,
    error: Callable[[Any, Any], float],
    tolerance: Callable[[str], float],
    of: str,
) -> dict[str, float]:
    """The errors of what ``ways`` return against that of ``reference``, which is left out.

    CheckFailed where one is above its tolerance; ``of`` says what was run.
    """
    want, errors = run(reference), {}
    for way in ways:
        if way != reference:
            errors[way] = error(run(way), want)
            # A comparison with NaN is false, so that NaN fails.
            if not errors[way] <= tolerance(way):
                raise CheckFailed(
                    f"{of}: {way} and {reference} differ by {errors[way]:.1e}; allowed are "
                    f"{tolerance(way):.1e}. Nothing was reported of them"
                )
    return errors


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


def milliseconds(seconds: float) -> str:
    """Three digits, and all of more than a second."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def spread(row: Row, text: Callable[[float], str] = milliseconds) -> str:
    """The quartiles of ``calls_row``."""
    low, high = row["seconds_quartiles"]
    return f"{text(low)} to {text(high)}" if row["timed"] > 1 else "once"


def thread_count(count: int) -> str:
    """In words."""
    return "1 thread" if count == 1 else f"{count} threads"
