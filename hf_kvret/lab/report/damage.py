"""A damaged cell of a result file is named, whatever a table or picture stumbles over in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_kvret.lab.report.results import Cell, Results

# What tables and pictures run into where a number is missing or something else.
_STUMBLES = (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError)


@contextmanager
def naming_damage(measurement: Any, results: Results, path: Path | None) -> Iterator[None]:
    """Inside, a table or picture of ``results``, which ``path`` holds, is made.

    ``path`` None is for results that were never in a file: their errors are our own.

    Raises:
        ValueError: a cell lacks something, or has it of another type; the file is named, and the
            cell where a table of it alone can't be made either.
    """
    try:
        yield
    except _STUMBLES as error:
        if path is None:
            raise
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        cell = _damaged_cell(measurement, results)
        name = "" if cell is None else f", {' '.join(map(str, cell.values()))}"
        raise ValueError(
            f"{path} has a damaged cell{name} ({what}): delete it, or make it again"
        ) from error


def _damaged_cell(measurement: Any, results: Results) -> Cell | None:
    for cell, result in results:
        alone = Results(results.name, results.setup)
        alone.add(cell, result)
        try:
            measurement.table(alone)
        except _STUMBLES:
            return cell
    return None
