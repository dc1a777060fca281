"""Rows and pages of ``hf-kvret bench all``: a line for each cell, a table for each card."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_kvret.lab.bench.gpu_stages import STAGES, Stage, cells_of
from hf_kvret.lab.bench.tables import (
    SIZE,
    TIMES,
    Column,
    ms,
    of,
    step_counts,
    table_of,
    why_missing,
)
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.outputs import check_own, page_mark
from hf_kvret.lab.report.results import Cell
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.saved.folder import replace_file

_MOST_KERNELS = 12
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


def _share_over_bus(cell: Cell, row: Row) -> str:
    """Of the selected rows, how many came over the bus."""
    rows = row.get("selected_rows")
    return f"{row['bus_rows'] / rows:.0%}" if rows else "-"


_CHECK: Column = ("check", of(str, "check"))
_MS: Column = ("ms", of(ms, "seconds"))
_TIMES: tuple[Column, ...] = (
    _CHECK,
    _MS,
    *((name, text) for name, text in TIMES.items() if not name.endswith("moved")),
    ("steps", step_counts),
)
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "gate": (
        ("check", lambda cell, row: cell["check"]),
        ("state", of(str, "status")),
        ("detail", of(str, "detail")),
    ),
    "stores": (
        *SIZE,
        ("token", lambda cell, row: cell.get("token", "next")),
        *_TIMES,
        ("rows over the bus", _share_over_bus),
    ),
    "rest": (
        *SIZE,
        ("compiler", lambda cell, row: cell.get("inductor", "-")),
        _MS,
        ("scaled ms a layer", of(ms, "scaled", "seconds_per_layer")),
        ("scaled ms", of(ms, "scaled", "seconds")),
    ),
}


def write_page(page: Path, files: Sequence[Path]) -> Path:
    """Write the page of these row files; the text of ``gpu.notes.txt`` beside it comes first.

    Raises:
        ValueError: there are no rows, or ``page`` is none of ours.
    """
    rows = [row for file in files for row in read_rows(file)]
    cards = list(dict.fromkeys(row["card"] for row in rows))
    if not cards:
        raise ValueError(f"no rows for {page}: measure some with hf-kvret bench all --out DIR")
    notes = page.with_suffix(".notes.txt")
    texts = [
        "# How fast is it on a GPU?",
        *([notes.read_text(encoding="utf-8").strip()] if notes.is_file() else []),
        "The shape is llama-3.1-8b in bfloat16, with random weights and random rows. Opponents ran "
        "in the same call, and cards have tables of their own. Random weights select at random, so "
        '`store="resident"` finds few rows in its buffer, but where each step has the same token.',
    ]
    for stage in STAGES:
        texts.append(f"## {stage.question}")
        for card in cards:
            texts += _section(stage, card, [row for row in rows if row["card"] == card])
    texts += ["## How was it measured?", *(_environment(row) for row in rows if "cell" not in row)]
    check_own(page, "give another --out")
    replace_file(page, ("\n\n".join([*texts, page_mark("bench all")]) + "\n").encode())
    return page


def _section(stage: Stage, card: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of a stage on a card, and a sentence about what is missing."""
    # The last row counts where a cell was measured again.
    newest = {
        label(row["cell"]): (row["cell"], row["row"])
        for row in rows
        if row.get("stage") == stage.name
    }
    cells = cells_of(stage, "(dry)" in card)
    missing = [label(cell) for cell in cells if label(cell) not in newest]
    if not newest:
        return [f"**{card}**: not measured."]
    texts = [f"**{card}**"] if "(dry)" not in card else [f"**{card}**: no number means anything."]
    if stage.name == "profile":
        texts += [_kernels(cell, row) for cell, row in newest.values()]
    else:
        columns = _COLUMNS.get(stage.name, (*SIZE, *_TIMES))
        lead = 1 if stage.name == "gate" else len(SIZE)
        texts.append(table_of(columns, newest.values(), lead))
    if missing:
        texts.append(f"Not measured: {'; '.join(missing)}.")
    return texts


def _kernels(cell: Cell, row: Row) -> str:
    if "kernels" not in row:
        return f"{label(cell)}: {why_missing(row) or 'no row'}"
    lines = [
        (
            f"`{kernel['name'][:60].replace('|', '/')}`",
            f"{kernel['launches']:.1f}",
            *(f"{kernel[name]:.1f}" for name in ("us", "step_us")),
        )
        for kernel in row["kernels"][:_MOST_KERNELS]
    ]
    table = markdown_table(("kernel", "launches a step", "us each", "us a step"), lines)
    return (
        f"{label(cell)}: {row['launches']:.0f} launches a step, busy for {row['busy_us']:,.0f} of "
        f"{row['span_us']:,.0f} us.\n\n{table}"
    )


def _environment(row: dict[str, Any]) -> str:
    here = row["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    command = here.get("command", "hf-kvret bench all --out DIR")
    text = f"    {command}\n\n{row['card']}; Python {here['python']}, {versions}."
    kernels = row.get("triton", {})
    if "carried" not in kernels:
        return text
    fits = "fit" if kernels["here"] == kernels["carried"] else "do not fit, and were compiled anew"
    return f"{text} {kernels['kernels']} compiled kernels were carried along; they {fits}."
