"""Rows of ``bench index-build`` as markdown and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_kvret.evaluation.plots import plot_lines
from hf_kvret.evaluation.results import Results
from hf_kvret.evaluation.tables import markdown_table

_BASE = "ctkvr"
_HEADER = (
    "tokens",
    "index",
    "build ms",
    "quartiles",
    f"times {_BASE}",
    "recall@k",
    "mass",
    "best mass",
    "keys compared",
    "settings",
)


def index_build_table(results: Results) -> str:
    """A line for each length and way; what was not measured says why."""
    lines = []
    base = {cell["length"]: row for cell, row in results if cell["cache"] == _BASE}
    cells = sorted(results, key=lambda entry: entry[0]["length"])
    for cell, row in cells:
        first = (f"{cell['length']:,}", cell["cache"])
        if "seconds" not in row:
            lines.append((*first, row["skipped"], *[""] * (len(_HEADER) - 3)))
            continue
        low, high = row["seconds_quartiles"]
        lines.append(
            (
                *first,
                _ms(row["seconds"]),
                f"{_ms(low)} to {_ms(high)}" if row["timed"] > 1 else "once",
                _times(row, base.get(cell["length"])),
                f"{row['recall']:.3f}",
                f"{row['mass']:.3f}",
                f"{row['best_mass']:.3f}",
                f"{row['compared']:,.0f}",
                row["settings"],
            )
        )
    return f"{_said(results.setup)}\n\n{markdown_table(_HEADER, lines)}"


def plot_index_build(path: Path, results: Results) -> None:
    """Seconds against length, both on a log scale, a line for each way that was measured."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for cell, row in sorted(results, key=lambda entry: entry[0]["length"]):
        if "seconds" in row:
            xs, ys = lines.setdefault(cell["cache"], ([], []))
            xs.append(float(cell["length"]))
            ys.append(row["seconds"])
    title = f"making an index of one layer, {_where(results.setup)}"
    plot_lines(path, lines, title=title, x="tokens", y="seconds", log_x=True, log_y=True)


def _said(setup: dict[str, Any]) -> str:
    keys = "Synthetic keys" if setup["keys"] == "random" else f"Keys of layer {setup['layer']}"
    return (
        f"{keys} of {setup['heads']} KV heads of {setup['dim']} with {setup['group']} query heads "
        f"each, {setup['top_k']} keys selected for {setup['queries']} queries after the prompt; "
        f"{_where(setup)}."
    )


def _where(setup: dict[str, Any]) -> str:
    threads = "1 thread" if setup["threads"] == 1 else f"{setup['threads']} threads"
    return threads if setup["device"] == "cpu" else f"ours on {setup['device']}, faiss on {threads}"


def _times(row: dict[str, Any], base: dict[str, Any] | None) -> str:
    if base is None or "seconds" not in base:
        return "-"
    return f"{row['seconds'] / base['seconds']:.3g}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
