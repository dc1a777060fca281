"""Rows of a benchmark as markdown and as pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.plots import plot_lines, series
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import Columns, table_of

Text = Callable[[Cell, Row], str]
"""Gives the text of a column, from a cell and its row."""


def ms(seconds: float) -> str:
    """Milliseconds: three digits of them, and all of more than a second."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def mb(count: float) -> str:
    """Megabytes of a number of bytes."""
    return f"{count / 1e6:,.1f}"


def of(style: Callable[[Any], str], *keys: str) -> Text:
    """A column's text: the value at ``keys`` in a row, written by ``style``; ``-`` without it."""

    def text(cell: Cell, row: Row) -> str:
        value: Any = row
        for key in keys:
            value = None if value is None else value.get(key)
        return "-" if value is None else style(value)

    return text


per_second, tenths = "{:,.1f}".format, "{:.1f}".format

SIZE: Columns = {
    "cache": lambda cell, row: cell["cache"],
    "context": lambda cell, row: f"{cell['context']:,}",
    "batch": lambda cell, row: str(cell["batch"]),
}
TIMES: Columns = {
    "quartiles": of(lambda ends: " to ".join(map(ms, ends)), "seconds_quartiles"),
    "tokens/s": of(per_second, "tokens_per_second"),
    "device MB moved": of(mb, "floor_device_bytes"),
    "bus MB moved": of(mb, "floor_host_bytes"),
    "floor ms": of(ms, "floor_seconds"),
    "time / floor": of(tenths, "time_over_floor"),
    "cache device MB": of(mb, "device_bytes"),
    "cache host MB": of(mb, "host_bytes"),
}
"""Columns of every time measurement behind that of the time, by header."""


def timing_table(results: Results, unit: str) -> str:
    """The table of a time measurement; ``unit`` says what the milliseconds are of."""
    # Beside the median of decode steps stands the mean, which flushes and captures change.
    has_steps = any("steps" in row for _, row in results)
    mean, steps = {f"mean {unit}": of(ms, "seconds_mean")}, {"steps": step_counts}
    columns = {
        **SIZE,
        "filled by": of(str, "fill"),
        "check": of(str, "check"),
        unit: of(ms, "seconds"),
        **(mean if has_steps else {}),
        **TIMES,
        **(steps if has_steps else {}),
    }
    if any(row.get("chunk") for _, row in results):
        columns["tokens a pass"] = of("{:,}".format, "chunk")
    if any(row.get("tokens_read") for _, row in results):
        columns["tokens read a turn"] = of(_counts, "tokens_read")
    if any(row.get("attention_seconds") for _, row in results):
        columns["ms attention of a layer"] = of(ms, "attention_seconds")
    if _is_scaled(results):
        columns[f"scaled {unit}"] = of(_with_rounds, "scaled")
        columns["scaled ms a layer"] = of(ms, "scaled", "seconds_per_layer")
    return _described(results, table_of(results, columns, len(SIZE) + 1) + _step_notes(results))


def step_counts(cell: Cell, row: Row) -> str:
    """The timed steps of a row by kind, ``"31 replay, 1 capture"``; ``"-"`` where it has none."""
    counts = row.get("steps")
    return "-" if not counts else ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _counts(counts: list[int]) -> str:
    """``"120"``, or ``"119 to 121"`` where they differ."""
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def _step_notes(results: Results) -> str:
    """Lines below a table: why steps of which caches were not replayed."""
    reasons: dict[str, list[str]] = {}
    for cell, row in results:
        if row.get("not_replayed"):
            reasons.setdefault(row["not_replayed"], []).append(cell["cache"])
    lines = [
        f"- not replayed: {', '.join(dict.fromkeys(caches))}: {reason}"
        for reason, caches in reasons.items()
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def _is_scaled(results: Results) -> bool:
    """Whether there are estimates for all layers, which files of earlier versions have."""
    return any("scaled" in row for _, row in results)


def _described(results: Results, table: str) -> str:
    """The table, below how many layers were measured where these are not all."""
    setup = results.setup
    if setup["layers"] == setup["of_layers"]:
        return table
    head = "a small head and small MLPs" if setup.get("part") == "attention" else "its head"
    count, name = f"{setup['layers']} of {setup['of_layers']}", setup["shape"]
    measured = f"Measured: {count} layers of {name} with {head}."
    if _is_scaled(results):
        measured += ' Columns that begin with "scaled" are estimates for all of them.'
    return f"{measured}\n\n{table}"


def plot_contexts(path: Path, results: Results, title: str) -> None:
    """Milliseconds of the rows that have them against context, a line for each cache and batch."""
    rows = [(cell, row) for cell, row in results if "seconds" in row]
    rows.sort(key=lambda pair: pair[0]["context"])
    several = len({cell["batch"] for cell, _ in rows}) > 1
    lines = series(
        (
            f"{cell['cache']}, batch {cell['batch']}" if several else cell["cache"],
            float(cell["context"]),
            1e3 * row["seconds"],
        )
        for cell, row in rows
    )
    setup = results.setup
    heading = f"{setup['shape']}: {title}"
    if setup["layers"] < setup["of_layers"]:
        heading += f", {setup['layers']} of {setup['of_layers']} layers"
    plot_lines(path, lines, title=heading, x="context (tokens)", y="ms", log_x=True, log_y=True)


def _with_rounds(scaled: Row) -> str:
    if scaled["seconds"] is None:
        return "-"
    low, high = map(ms, scaled["seconds_by_round"])
    return f"{ms(scaled['seconds'])} (rounds {low} to {high})"
