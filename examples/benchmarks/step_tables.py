"""Rows of ``bench step --modelled`` as markdown and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine_model import ASSUMPTIONS

from hf_kvret.benchmark import timed
from hf_kvret.evaluation.measurement import Row
from hf_kvret.evaluation.plots import plot_groups
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.tables import markdown_table


def step_table(results: Results) -> str:
    """A line for each cache, context and batch; what is assumed above."""
    columns: list[timed.Column] = [
        ("cache", lambda cell, row: cell["cache"]),
        ("tokens", lambda cell, row: f"{cell['context']:,}"),
        ("batch", lambda cell, row: str(cell["batch"])),
        ("ms a step", _range("seconds")),
        ("without norms, rotations", _range("seconds_without_norms")),
        ("matrices", _range("weight_seconds")),
        ("norms, rotations", _range("norm_seconds")),
        ("the model's other kernels", _range("other_seconds")),
        ("the cache's kernels", _range("kernel_seconds")),
        ("torch in the cache", _range("torch_seconds")),
        ("rows on the host", _range("host_seconds")),
        ("replayed", lambda cell, row: "yes" if row.get("replayed", True) else "no"),
        ("launches", lambda cell, row: f"{row['launches']:,}"),
        ("the cache's, a layer", lambda cell, row: f"{row['launches_a_layer']:g}"),
    ]
    if any("before" in row for _, row in results):
        columns += [
            ("ms a step before", _before(_range("seconds"))),
            ("without norms before", _before(_range("seconds_without_norms"))),
            ("kernels before", _before(_range("kernel_seconds"))),
            ("a layer before", _before(lambda cell, row: f"{row['launches_a_layer']:g}")),
        ]
    return timed.rows_table(columns, _sorted(results), 3, _said(results.setup))


def plot_step(path: Path, results: Results) -> None:
    """Slowest and quickest modelled milliseconds of each cache at the smallest batch."""
    caches = list(dict.fromkeys(cell["cache"] for cell, _ in results))
    least = min(cell["batch"] for cell, _ in results)
    bars: dict[str, list[float | None]] = {}
    for context in sorted({cell["context"] for cell, _ in results}):
        rows = [
            results.find({"cache": cache, "context": context, "batch": least}) for cache in caches
        ]
        for end, name in enumerate(("quickest", "slowest")):
            bars[f"{context:,} tokens, {name}"] = [
                None if row is None or "seconds" not in row else 1e3 * row["seconds"][end]
                for row in rows
            ]
    title = f"a decode step, batch {least}, modelled, not measured"
    plot_groups(path, caches, bars, title=title, y="ms")


def _sorted(results: Results) -> Iterator[tuple[Cell, Row]]:
    yield from sorted(results, key=lambda one: (one[0]["batch"], one[0]["context"]))


def _range(name: str) -> Callable[[Cell, Row], str]:
    """``"5.31 to 6.2"`` milliseconds; ``-`` where there is nothing of it."""

    def text(cell: Cell, row: Row) -> str:
        quick, slow = row.get(name, (0.0, 0.0))
        return f"{1e3 * quick:.3g} to {1e3 * slow:.3g}" if slow else "-"

    return text


def _before(column: Callable[[Cell, Row], str]) -> Callable[[Cell, Row], str]:
    """Of the earlier version; ``-`` where it had no such step."""

    def text(cell: Cell, row: Row) -> str:
        before = row.get("before")
        return "-" if before is None else column(cell, before)

    return text


def _said(setup: dict[str, Any]) -> str:
    lines = [
        (name, _figure(name, setup[name][0]), _figure(name, setup[name][1]), one.source)
        for name, one in ASSUMPTIONS.items()
    ]
    return (
        f"**Modelled, not measured; its error is unknown.** A decode step of {setup['shape']} in "
        f"bfloat16 on an {setup['chip']}, in milliseconds, as a CUDA graph replays it: kernels one "
        f"after the other, each the longest of issuing its instructions, moving its bytes at "
        f"{setup['bandwidth'] / 1e12:g} TB/s, and the least that a kernel takes, and a gap behind "
        f"it. Numbers are ranges, from the quickest to the slowest of what is assumed:\n\n"
        f"{markdown_table(('assumption', 'quickest', 'slowest', 'from'), lines)}\n\n"
        f"*matrices* reads all weights once. *norms, rotations* and *the model's other kernels* "
        f"are those of unmodified transformers, an operation a kernel; *without norms, rotations* "
        f"is the step with none of the former. *the cache's kernels* are Triton's, from their "
        f"machine code; for `static` they are flash decoding over all keys and values, and the "
        f"merge of its pieces. *rows on the host* is the step with the selected rows in pinned "
        f"host memory, nothing done while they come. A step that is not *replayed* has the host "
        f"launch its kernels, which takes longer than stands here."
    )


def _figure(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return f"{1e6 * value:g} us"
    return f"{value / 1e9:g} GB/s" if name.endswith("bandwidth") else f"{value:g}"
