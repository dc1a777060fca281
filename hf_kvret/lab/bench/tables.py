"""Rows of a benchmark as markdown and as pictures. Measured and scaled columns stay apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_kvret.lab.bench.timed import Column, ms, series
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import markdown_table


def mb(count: float) -> str:
    """Megabytes of a number of bytes."""
    return f"{count / 1e6:,.1f}"


def of(style: Callable[[Any], str], *keys: str) -> Callable[[Cell, Row], str]:
    """A column's text: the value at ``keys`` in a row, written by ``style``; None is ``-``."""

    def text(cell: Cell, row: Row) -> str:
        value: Any = row
        for key in keys:
            value = value[key]
        return "-" if value is None else style(value)

    return text


def label(cell: Cell) -> str:
    """The cache of a cell, and where several weights were measured, which it had."""
    return f"{cell['cache']}, {cell['weights']} weights" if "weights" in cell else cell["cache"]


per_second, tenths = "{:,.1f}".format, "{:.1f}".format

SIZE: tuple[Column, ...] = (
    ("cache", lambda cell, row: label(cell)),
    ("context", lambda cell, row: f"{cell['context']:,}"),
    ("batch", lambda cell, row: str(cell["batch"])),
    ("filled by", of(str, "fill")),
    ("check", of(str, "check")),
)
"""The first columns of all tables; those without numbers have all but the last."""


def why_missing(row: Mapping[str, Any]) -> str | None:
    """Why this row has no numbers, None where it has: memory ran out, or the check failed."""
    if "check_failed" in row:
        return f"check failed: {row['check_failed']}"
    return row.get("out_of_memory")


def table_of(columns: Sequence[Column], rows: Iterable[tuple[Cell, Row]]) -> str:
    """A markdown table; the column behind ``SIZE`` says why the others have no numbers."""
    lines = []
    for cell, row in rows:
        why = why_missing(row)
        filled = columns if why is None else columns[: len(SIZE) - 1]
        line = [text(cell, row) for _, text in filled] + ["-"] * (len(columns) - len(filled))
        if why is not None:
            line[len(SIZE)] = why
        lines.append(line)
    return markdown_table([header for header, _ in columns], lines)


def timing_table(results: Results, unit: str) -> str:
    """The table of a time measurement; ``unit`` says what the milliseconds are of."""
    columns: list[Column] = [
        *SIZE,
        (unit, of(ms, "seconds")),
        ("quartiles", of(lambda ends: " to ".join(map(ms, ends)), "seconds_quartiles")),
        ("tokens/s", of(per_second, "tokens_per_second")),
        ("device MB moved", of(mb, "floor_device_bytes")),
        ("bus MB moved", of(mb, "floor_host_bytes")),
        ("floor ms", of(ms, "floor_seconds")),
        ("time / floor", of(tenths, "time_over_floor")),
        ("cache device MB", of(mb, "device_bytes")),
        ("cache host MB", of(mb, "host_bytes")),
    ]
    # Decode steps have labels, prompts have none.
    if any("steps" in row for _, row in results):
        # Beside the median stands the mean, which flushes and captures change.
        columns.insert(len(SIZE) + 1, (f"mean {unit}", of(ms, "seconds_mean")))
        columns.append(("steps", step_counts))
    if any(row.get("attention_seconds") for _, row in results):
        attention = of(
            lambda row: ms(row["attention_seconds"]) if row.get("attention_seconds") else "-"
        )
        columns.append(("ms attention of a layer", attention))
    if any("scaled" in row for _, row in results):
        columns += [
            (f"scaled {unit}", of(_with_rounds, "scaled")),
            ("scaled tokens/s", of(per_second, "scaled", "tokens_per_second")),
            ("scaled ms a layer", of(ms, "scaled", "seconds_per_layer")),
            ("scaled floor ms", of(ms, "scaled", "floor_seconds")),
            ("scaled time / floor", of(tenths, "scaled", "time_over_floor")),
            ("scaled device MB", of(mb, "scaled", "device_bytes")),
        ]
    return described(results, table_of(columns, results) + _step_notes(results))


def step_counts(cell: Cell, row: Row) -> str:
    """The timed steps of a row by label, ``"31 replay, 1 capture"``; ``"-"`` where it has none."""
    counts = row.get("steps")
    return "-" if not counts else ", ".join(f"{count} {label}" for label, count in counts.items())


def _step_notes(results: Results) -> str:
    """Lines below a table: times by label where there are several, and why none is replayed."""
    lines = []
    reasons: dict[str, list[str]] = {}
    for cell, row in results:
        by_label = row.get("seconds_by_kind") or {}
        if len(by_label) > 1:
            times = ", ".join(f"{label} {ms(seconds)} ms" for label, seconds in by_label.items())
            lines.append(f"- {label(cell)}, {cell['context']:,} x {cell['batch']}: {times}")
        if row.get("not_replayed"):
            reasons.setdefault(row["not_replayed"], []).append(cell["cache"])
    lines += [
        f"- not replayed: {', '.join(dict.fromkeys(caches))}: {reason}"
        for reason, caches in reasons.items()
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def described(results: Results, table: str) -> str:
    """The table, below what it says of the whole model where only some layers were measured."""
    setup = results.setup
    if setup["layers"] == setup["of_layers"]:
        return table
    head = "a small head and small MLPs" if setup.get("part") == "attention" else "its head"
    return (
        f"Measured: {setup['layers']} of {setup['of_layers']} layers of {setup['shape']} with "
        f'{head}. Columns that begin with "scaled" are estimates for all of them.\n\n{table}'
    )


def plot_contexts(path: Path, results: Results, title: str, unit: str, key: str) -> None:
    """``key`` of the rows that have it against context, a line for each cache and batch.

    ``unit`` is ``ms`` of seconds or ``MB`` of bytes.
    """
    rows = [(cell, row) for cell, row in results if key in row and "batch" in cell]
    several = len({cell["batch"] for cell, _ in rows}) > 1
    points = [
        (
            f"{label(cell)}, batch {cell['batch']}" if several else label(cell),
            float(cell["context"]),
            row[key] * {"ms": 1e3, "MB": 1e-6}[unit],
        )
        for cell, row in sorted(rows, key=lambda pair: pair[0]["context"])
    ]
    setup = results.setup
    heading = f"{setup['shape']}: {title}"
    if setup["layers"] < setup["of_layers"]:
        heading += f", {setup['layers']} of {setup['of_layers']} layers"
    plot_lines(
        path, series(points), title=heading, x="context (tokens)", y=unit, log_x=True, log_y=True
    )


def _with_rounds(scaled: Row) -> str:
    if scaled["seconds"] is None:
        return "-"
    low, high = map(ms, scaled["seconds_by_round"])
    return f"{ms(scaled['seconds'])} (rounds {low} to {high})"
