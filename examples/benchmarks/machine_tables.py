"""Rows of ``bench machine-code`` as markdown and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_kvret.benchmark import timed
from hf_kvret.evaluation.measurement import Row
from hf_kvret.evaluation.plots import plot_groups
from hf_kvret.evaluation.results import Cell, Results


def machine_table(results: Results) -> str:
    """A line for each kernel of a part of a step, context and batch; what is assumed above."""
    columns: tuple[timed.Column, ...] = (
        ("part", lambda cell, row: cell["cache"]),
        ("tokens", lambda cell, row: f"{cell['context']:,}"),
        ("batch", lambda cell, row: str(cell["batch"])),
        ("kernel", lambda cell, row: row["kernel"] + _times(row["launches"])),
        ("grid", lambda cell, row: "x".join(map(str, row["grid"]))),
        ("CTAs", lambda cell, row: f"{row['ctas']:,}"),
        ("warps", lambda cell, row: str(row["warps"])),
        ("registers", lambda cell, row: str(row["registers"])),
        ("spill bytes", lambda cell, row: str(row["spill_bytes"])),
        ("shared KiB", lambda cell, row: f"{row['shared_bytes'] / 1024:.3g}"),
        ("CTAs an SM", lambda cell, row: str(row["ctas_at_once"])),
        ("load bytes", lambda cell, row: str(row["load_bytes"])),
        ("loads", lambda cell, row: _widths(row["load_widths"])),
        ("instructions", _both("instructions")),
        ("of the last", lambda cell, row: str(row.get("last_instructions", 0) or "")),
        ("SHFL", _both("shuffles")),
        ("STS", _both("shared_stores")),
        ("BAR", _both("barriers")),
        ("issue us", lambda cell, row: _microseconds(row["issue_seconds"])),
        ("DRAM us", lambda cell, row: _microseconds(row["dram_seconds"])),
        ("issue / DRAM", lambda cell, row: f"{row['issue_seconds'] / row['dram_seconds']:.3g}"),
    )
    if any("issue_seconds_before" in row for _, row in _kernels(results)):
        columns += (
            ("issue us before", lambda cell, row: _earlier(row, "issue_seconds")),
            ("DRAM us before", lambda cell, row: _earlier(row, "dram_seconds")),
        )
    return timed.rows_table(columns, _kernels(results), 3, _said(results.setup))


def plot_machine(path: Path, results: Results) -> None:
    """Modelled microseconds of each part at batch 1: issuing its instructions, moving its bytes."""
    parts = list(dict.fromkeys(cell["cache"] for cell, _ in results))
    least = min(cell["batch"] for cell, _ in results)
    bars: dict[str, list[float | None]] = {}
    for context in sorted({cell["context"] for cell, _ in results}):
        for kind in ("issue", "dram"):
            name = f"{kind if kind == 'issue' else 'DRAM'}, {context:,} tokens"
            bars[name] = [
                _sum(results.find({"cache": part, "context": context, "batch": least}), kind)
                for part in parts
            ]
    title = f"kernels of a decode step, batch {least}, modelled"
    plot_groups(path, parts, bars, title=title, y="us a layer")


def _kernels(results: Results) -> Iterator[tuple[Cell, Row]]:
    for cell, row in sorted(results, key=lambda one: (one[0]["batch"], one[0]["context"])):
        yield from ((cell, kernel) for kernel in row.get("kernels", [row]))


def _sum(row: Row | None, kind: str) -> float | None:
    if row is None or "kernels" not in row:
        return None
    return 1e6 * sum(kernel[f"{kind}_seconds"] for kernel in row["kernels"])


def _said(setup: dict[str, Any]) -> str:
    return (
        f"Kernels of one layer's decode step in the shape of Llama-3.1-8B (8 KV heads of 128 with "
        f"4 query heads each, bfloat16), compiled for sm_90 with triton {setup['triton']} and "
        f"ptxas {setup['ptxas']}. Counts are of the machine code; a second number is of those in "
        f"loops. *load bytes* is the width in which most bytes are loaded, *loads* counts all "
        f"widths. **Times are modelled, not measured, and their error is unknown**: *issue* is the "
        f"time in which the multiprocessor with the most CTAs issues what its warps execute, at "
        f"{setup['clock'] / 1e9:g} GHz on {setup['multiprocessors']} multiprocessors, without any "
        f"waiting; *DRAM* is that of the bytes that a kernel can't do without, each once, at "
        f"{setup['bandwidth'] / 1e12:g} TB/s. All figures of the {setup['chip']} stand in "
        f"machine_model.py, trips of loops and bytes in step_work.py."
    )


def _earlier(row: Row, name: str) -> str:
    """Of a kernel that was there before; ``-`` for a new one."""
    seconds = row.get(f"{name}_before")
    return "-" if seconds is None else _microseconds(seconds)


def _both(name: str) -> Callable[[Cell, Row], str]:
    def text(cell: Cell, row: Row) -> str:
        return f"{row[name]}" + (f" / {row[f'loop_{name}']}" if row["loops"] else "")

    return text


def _times(launches: int) -> str:
    return f" x{launches}" if launches > 1 else ""


def _widths(widths: dict[str, int]) -> str:
    """``"16: 8, 4: 3"``."""
    ordered = sorted(widths.items(), key=lambda one: -int(one[0]))
    return ", ".join(f"{width}: {count}" for width, count in ordered)


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.3g}"
