"""The report of ``hf-kvret fits`` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.saved.identity import printable

_HEADER = (
    *("cache", "window", "index", "store", "host store", "device with weights", "fits"),
    *("largest context", "largest batch", "read a step", "floor ms"),
)


def report_text(report: Mapping[str, Any]) -> str:
    """Weights and memory in a paragraph, a table for each context, what was refused, notes."""
    contexts = dict.fromkeys(row["context"] for row in report["rows"])
    paragraphs = [_opening(report)]
    for context in contexts:
        rows = [row for row in report["rows"] if row["context"] == context]
        lines = [_line(report, row) for row in rows if "refused" not in row]
        title = f"{context:,} tokens x {report['batch']}, sizes in GB"
        paragraphs.append(f"{title}\n\n{markdown_table(_HEADER, lines)}")
    refused = {row["cache"]: row["refused"] for row in report["rows"] if "refused" in row}
    paragraphs += [f"{cache}: {reason}" for cache, reason in refused.items()]
    return "\n\n".join([*paragraphs, *_notes(report, list(contexts))])


def _opening(report: Mapping[str, Any]) -> str:
    machine, weights = report["machine"], report["weights"]
    host = machine["host"]
    where = "in the CPU's memory" if host is None else f"{_gb(host)} GB on the host"
    return (
        f"Memory: {machine['origin']}\n\n"
        f"{printable(report['model'])}, {report['dtype']}: weights {_gb(weights['held'])} GB; "
        f"{_gb(machine['device'])} GB on the device, {_gb(machine['reserve'])} GB of them kept "
        f"free for passes, {where}; top_k={report['top_k']}"
    )


def _line(report: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    nbytes = row["bytes"]
    return [
        row["cache"],
        _gb(nbytes["window"]),
        _gb(nbytes["index"] + nbytes["shared"]),
        _gb(nbytes["store_device"]),
        _gb(row["host_bytes"]),
        _gb(row["device_bytes"] + report["weights"]["held"]),
        "yes" if row["fits"] else "no",
        f"{row['largest_context']:,}",
        f"{row['largest_batch']:,}",
        _gb(row["read_bytes"]),
        f"{row['floor_seconds'] * 1e3:.1f}",
    ]


def _notes(report: Mapping[str, Any], contexts: list[int]) -> list[str]:
    notes = []
    positions, skipped = report["positions"], report["layers_left_out"]
    if positions is not None and max(contexts) > positions:
        notes.append(
            f"The model was made for {positions:,} positions: more of them fit, but need a model "
            "or a RoPE scaling that knows them."
        )
    if skipped:
        notes.append(
            f"The states of {skipped} linear or recurrent layers, which don't grow, are left out."
        )
    return notes


def _gb(count: float) -> str:
    """Three digits or two decimals."""
    amount = count / 1e9
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.2f}"
