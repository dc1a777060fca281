"""Rows of cells in a file of lines, which outlive whatever happens to the process."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_kvret.lab.report.results import Cell

_SIZE = ("cache", "context", "batch")


class RowFile:
    """``rows.jsonl``: a line for each finished cell, and one for each environment.

    What a kill left of a line is no row, and the next one begins behind it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """All rows, in their order."""
        return read_rows(self.path)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; it is on the disk when this returns."""
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("ab") as file:
            file.write(b"\n" * (torn and self.path.stat().st_size > 0))
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; lines that are no JSON are left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def label(cell: Cell) -> str:
    """A cell in words, as ``paris at 65,536 x 1``."""
    if "cache" not in cell:
        return " ".join(map(str, cell.values()))
    more = [str(value) for name, value in cell.items() if name not in _SIZE]
    size = f"{cell['cache']} at {cell['context']:,} x {cell['batch']}"
    return ", ".join([size, *more])
