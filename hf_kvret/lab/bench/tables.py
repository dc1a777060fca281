"""Rows of a benchmark as markdown and as pictures. Measured and scaled columns stay apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.plots import plot_lines
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import markdown_table

Column = tuple[str, Callable[[Cell, Row], str]]
"""A header, and what stands below it for a cell and its row."""


def ms(seconds: float) -> str:
    """Milliseconds, three digits of them below a second."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def mb(count: float) -> str:
    """Megabytes of a number of bytes."""
    return f"{count / 1e6:,.1f}"


def of(form: Callable[[Any], str], *keys: str) -> Callable[[Cell, Row], str]:
    """What ``keys`` lead to in a row, written by ``form``; None is ``-``."""

    def text(cell: Cell, row: Row) -> str:
        value: Any = row
        for key in keys:
            value = value[key]
        return "-" if value is None else form(value)

    return text


per_second, tenths = "{:,.1f}".format, "{:.1f}".format

SIZE: tuple[Column, ...] = (
    ("cache", lambda cell, row: cell["cache"]),
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


def table_of(
    columns: Sequence[Column], rows: Iterable[tuple[Cell, Row]], reason: int = len(SIZE)
) -> str:
    """A markdown table; ``reason`` is the column that says why the others have no numbers."""
    lines = []
    for cell, row in rows:
        why = why_missing(row)
        known = columns if why is None else columns[: min(reason, len(SIZE) - 1)]
        line = [text(cell, row) for _, text in known] + ["-"] * (len(columns) - len(known))
        if why is not None:
            line[reason] = why
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
    # Only decode steps have kinds.
    if any("steps" in row for _, row in results):
        # The mean stands beside the median, which knows nothing of flushes and captures.
        columns.insert(len(SIZE) + 1, (f"mean {unit}", of(ms, "seconds_mean")))
        columns.append(("steps", told_steps))
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


def told_steps(cell: Cell, row: Row) -> str:
    """``"31 replay, 1 capture"``: the timed steps of a row by kind; ``"-"`` where it has none."""
    counts = row.get("steps")
    return "-" if not counts else ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _step_notes(results: Results) -> str:
    """Lines below a table: times of single kinds where there are several, and why none is replayed.

    Begins with an empty line; empty where there is nothing to say.
    """
    lines = []
    reasons: dict[str, list[str]] = {}
    for cell, row in results:
        by_kind = row.get("seconds_by_kind") or {}
        if len(by_kind) > 1:
            told = ", ".join(f"{kind} {ms(seconds)} ms" for kind, seconds in by_kind.items())
            lines.append(f"- {cell['cache']}, {cell['context']:,} x {cell['batch']}: {told}")
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
    return (
        f"Measured: {setup['layers']} of {setup['of_layers']} layers of {setup['shape']} with its "
        f'head. Columns that begin with "scaled" are estimates for all of them.\n\n{table}'
    )


def plot_contexts(path: Path, results: Results, title: str, unit: str, key: str) -> None:
    """``key`` of the rows that have it against context, a line for each cache and batch.

    ``unit`` is ``ms`` of seconds or ``MB`` of bytes.
    """
    rows = [(cell, row) for cell, row in results if key in row and "batch" in cell]
    lines: dict[str, tuple[list[float], list[float]]] = {}
    several = len({cell["batch"] for cell, _ in rows}) > 1
    for cell, row in sorted(rows, key=lambda pair: pair[0]["context"]):
        name = f"{cell['cache']}, batch {cell['batch']}" if several else cell["cache"]
        xs, ys = lines.setdefault(name, ([], []))
        xs.append(float(cell["context"]))
        ys.append(row[key] * {"ms": 1e3, "MB": 1e-6}[unit])
    setup = results.setup
    heading = f"{setup['shape']}: {title}"
    if setup["layers"] < setup["of_layers"]:
        heading += f", {setup['layers']} of {setup['of_layers']} layers"
    plot_lines(path, lines, title=heading, x="context (tokens)", y=unit, log_x=True, log_y=True)


def _with_rounds(scaled: Row) -> str:
    if scaled["seconds"] is None:
        return "-"
    low, high = map(ms, scaled["seconds_by_round"])
    return f"{ms(scaled['seconds'])} (rounds {low} to {high})"
