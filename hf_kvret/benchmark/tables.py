"""Rows of a benchmark as markdown and as pictures. Measured and scaled columns stay apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_kvret.evaluation.plots import plot_lines
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.tables import markdown_table

_SIZE = ("cache", "context", "batch", "filled by", "check")


def timing_table(results: Results, unit: str) -> str:
    """The table of a time measurement; ``unit`` says what the milliseconds are of."""
    scaled = any("scaled" in row for _, row in results)
    header = [
        *_SIZE,
        unit,
        "quartiles",
        "tokens/s",
        "device MB moved",
        "bus MB moved",
        "floor ms",
        "time / floor",
        "cache device MB",
        "cache host MB",
    ]
    # Only decode steps have kinds, and result files of earlier versions lack them.
    kinds = any("steps" in row for _, row in results)
    if kinds:
        header.append("steps")
        # Beside the median, which knows nothing of flushes and captures.
        header.insert(header.index("quartiles"), f"mean {unit}")
    if scaled:
        header += [
            f"scaled {name}" for name in (unit, "tokens/s", "floor ms", "time / floor", "device MB")
        ]
    rows = []
    for cell, row in results:
        if why_missing(row) is not None:
            rows.append(_missing(cell, row, len(header)))
            continue
        low, high = row["seconds_quartiles"]
        line = [
            *_size(cell, row),
            _ms(row["seconds"]),
            f"{_ms(low)} to {_ms(high)}",
            f"{row['tokens_per_second']:,.1f}",
            _mb(row["floor_device_bytes"]),
            _mb(row["floor_host_bytes"]),
            _ms(row["floor_seconds"]),
            f"{row['time_over_floor']:.1f}",
            _mb(row["device_bytes"]),
            _mb(row["host_bytes"]),
        ]
        if kinds:
            line.append(told_steps(row))
            mean = row.get("seconds_mean")
            line.insert(header.index(f"mean {unit}"), _or_dash(mean, _ms))
        if scaled:
            part = row["scaled"]
            line += [
                "-" if part["seconds"] is None else _with_rounds(part),
                _or_dash(part["tokens_per_second"], "{:,.1f}".format),
                _ms(part["floor_seconds"]),
                _or_dash(part["time_over_floor"], "{:.1f}".format),
                _mb(part["device_bytes"]),
            ]
        rows.append(line)
    return _described(results, markdown_table(header, rows) + step_notes(results))


def why_missing(row: Mapping[str, Any]) -> str | None:
    """Why this row has no numbers, None where it has: memory ran out, or the check failed."""
    if "check_failed" in row:
        return f"check failed: {row['check_failed']}"
    return row.get("out_of_memory")


def told_steps(row: dict[str, Any]) -> str:
    """``"31 replay, 1 capture"``: the timed steps of a row by kind; ``"-"`` where it has none."""
    counts = row.get("steps")
    return "-" if not counts else ", ".join(f"{count} {kind}" for kind, count in counts.items())


def step_notes(results: Results) -> str:
    """Lines below a table: times of single kinds where there are several, and why none is replayed.

    Begins with an empty line; empty where there is nothing to say.
    """
    lines = []
    for cell, row in results:
        by_kind = row.get("seconds_by_kind") or {}
        if len(by_kind) > 1:
            told = ", ".join(f"{kind} {_ms(seconds)} ms" for kind, seconds in by_kind.items())
            lines.append(f"- {cell['cache']}, {cell['context']:,} x {cell['batch']}: {told}")
    reasons: dict[str, list[str]] = {}
    for cell, row in results:
        if row.get("not_replayed"):
            reasons.setdefault(row["not_replayed"], []).append(cell["cache"])
    lines += [
        f"- not replayed: {', '.join(dict.fromkeys(caches))}: {reason}"
        for reason, caches in reasons.items()
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def memory_table(results: Results) -> str:
    """Two tables: peaks by batch, and the largest batch that fits."""
    peaks = [(cell, row) for cell, row in results if "batch" in cell]
    fits = [(cell, row) for cell, row in results if "fits" in cell]
    scaled = any("scaled" in row for _, row in peaks)
    header = [
        *_SIZE,
        "weights MB",
        "cache device MB",
        "cache host MB",
        "of full K,V",
        "peak beyond weights MB",
        "process growth MB",
    ]
    if scaled:
        header += ["scaled weights MB", "scaled cache device MB", "scaled peak MB"]
    rows = []
    for cell, row in peaks:
        if why_missing(row) is not None:
            rows.append(_missing(cell, row, len(header)))
            continue
        peak = _mb(row["device_peak_bytes"])
        line = [
            *_size(cell, row),
            _mb(row["weight_bytes"]),
            _mb(row["device_bytes"]),
            _mb(row["host_bytes"]),
            f"{row['device_bytes'] / row['full_bytes']:.1%}",
            peak if row["device_peak_is"] == "peak" else f"{peak} (cache bytes)",
            _or_dash(row["host_growth_bytes"], _mb),
        ]
        if scaled:
            part = row["scaled"]
            line += [
                _mb(part[name]) for name in ("weight_bytes", "device_bytes", "device_peak_bytes")
            ]
        rows.append(line)
    text = markdown_table(header, rows)
    if fits:
        lines = [
            (
                cell["cache"],
                f"{cell['context']:,}",
                f"{cell['fits'] / 1e9:g} GB",
                _or_dash(row["batch"], str),
                _or_dash(row.get("per_sequence_bytes"), _mb),
                row.get("how", row.get("why", "-")),
            )
            for cell, row in fits
        ]
        titles = ("cache", "context", "device memory", "largest batch", "MB a sequence", "how")
        text += f"\n\n{markdown_table(titles, lines)}"
    return _described(results, text)


def plot_seconds(path: Path, results: Results, title: str) -> None:
    """Milliseconds against context, a line for each cache and batch; measured ones only."""
    rows = [(cell, row) for cell, row in results if "seconds" in row]
    _plot(path, results, rows, title, "ms", lambda row: 1e3 * row["seconds"])


def plot_memory(path: Path, results: Results) -> None:
    """Bytes of the cache on the device against context; measured ones only."""
    rows = [(cell, row) for cell, row in results if "device_bytes" in row and "batch" in cell]
    _plot(path, results, rows, "cache on the device", "MB", lambda row: row["device_bytes"] / 1e6)


def _plot(
    path: Path,
    results: Results,
    rows: Sequence[tuple[Cell, dict[str, Any]]],
    title: str,
    unit: str,
    value: Callable[[dict[str, Any]], float],
) -> None:
    lines: dict[str, tuple[list[float], list[float]]] = {}
    batches = {cell["batch"] for cell, _ in rows}
    for cell, row in sorted(rows, key=lambda pair: pair[0]["context"]):
        name = cell["cache"] if len(batches) == 1 else f"{cell['cache']}, batch {cell['batch']}"
        xs, ys = lines.setdefault(name, ([], []))
        xs.append(float(cell["context"]))
        ys.append(value(row))
    setup = results.setup
    heading = f"{setup['shape']}: {title}"
    if setup["layers"] < setup["of_layers"]:
        heading += f", {setup['layers']} of {setup['of_layers']} layers"
    plot_lines(path, lines, title=heading, x="context (tokens)", y=unit, log_x=True, log_y=True)


def _described(results: Results, table: str) -> str:
    setup = results.setup
    if setup["layers"] == setup["of_layers"]:
        return table
    return (
        f"Measured: {setup['layers']} of {setup['of_layers']} layers of {setup['shape']} with its "
        f'head. Columns that begin with "scaled" are estimates for all of them.\n\n{table}'
    )


def _size(cell: Cell, row: dict[str, Any]) -> list[str]:
    return [cell["cache"], f"{cell['context']:,}", str(cell["batch"]), row["fill"], row["check"]]


def _missing(cell: Cell, row: dict[str, Any], width: int) -> list[str]:
    start = [cell["cache"], f"{cell['context']:,}", str(cell["batch"]), row["fill"]]
    start += ["-", str(why_missing(row))]
    return start + ["-"] * (width - len(start))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _with_rounds(part: dict[str, Any]) -> str:
    low, high = part["seconds_by_round"]
    return f"{_ms(part['seconds'])} (rounds {_ms(low)} to {_ms(high)})"


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def _or_dash(value: Any, form: Callable[[Any], str]) -> str:
    return "-" if value is None else form(value)
