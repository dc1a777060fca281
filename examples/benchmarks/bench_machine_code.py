"""Kernels of a decode step in the shape of Llama-3.1-8B, compiled for sm_90; no GPU is needed. A
row says of each kernel of a part what its machine code consists of, and which bytes it can't do
without. Nothing is measured.

    python examples/benchmarks/bench_machine_code.py --parts merge,window --context 128K --batch 1
    python examples/benchmarks/bench_machine_code.py --json kernels_sm90.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_clock import TimedTogether
from machine_code import COUNTS, Launch, check_tools, compile_parts, tool_versions
from step_kernels import LEAST_CONTEXT, PARTS, StepShape, moved_bytes

from hf_kvret.lab.bench.tables import Column, table_of
from hf_kvret.lab.evaluate.measurement import Progress, Row
from hf_kvret.lab.program import common_options as common
from hf_kvret.lab.program.arguments import known_names
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.plots import plot_groups
from hf_kvret.lab.report.results import Cell, Results

BANDWIDTH = 4.3e12
"""Bytes a second of an H200: nine tenths of its data sheet's."""


@dataclass(frozen=True, kw_only=True)
class MachineCodeOfStep(TimedTogether):
    """Machine code of the kernels of a decode step, and the bytes that they can't do without."""

    command = "bench"
    name = "machine-code"
    smallest = "--parts merge --context 128K --batch 1"

    parts: tuple[str, ...] = option(
        tuple(PARTS), f"of a step: {', '.join(PARTS)} (default: all)", kind=known_names(PARTS)
    )
    context: tuple[int, ...] = common.context_option((131_072, 1 << 20), "tokens of a sequence")
    batch: tuple[int, ...] = common.batch_option((1, 8))

    def check(self) -> None:
        """Errors as of ``check_tools``; ValueError for a short context."""
        check_tools()
        if min(self.context) < LEAST_CONTEXT:
            raise ValueError(
                f"--context {min(self.context)}: give at least {LEAST_CONTEXT:,} tokens, for which "
                "the parts of a step are described"
            )

    def setup(self) -> dict[str, Any]:
        return {"bandwidth": BANDWIDTH, **tool_versions()}

    def cells(self) -> list[Cell]:
        return [
            # Called a cache as in all results, so that the overview of pages finds it.
            {"cache": part, "context": context, "batch": batch}
            for context in self.context
            for batch in self.batch
            for part in self.parts
        ]

    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """Of all parts of a size; one process compiles them."""
        context, batch = group[0]["context"], group[0]["batch"]
        launches = compile_parts([cell["cache"] for cell in group], context, batch)
        return [
            {"kernels": [kernel_row(one) for one in launches if one.part == cell["cache"]]}
            for cell in group
        ]

    @classmethod
    def table(cls, results: Results) -> str:
        """A line for each kernel of a part of a step, context and batch."""
        return f"{_introduction(results.setup)}\n\n{table_of(_COLUMNS, _kernels(results), 3)}"

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Megabytes that each part moves at the smallest batch."""
        parts = list(dict.fromkeys(cell["cache"] for cell, _ in results))
        least = min(cell["batch"] for cell, _ in results)
        bars = {
            f"{context:,} tokens": [
                _megabytes(results.find({"cache": part, "context": context, "batch": least}))
                for part in parts
            ]
            for context in sorted({cell["context"] for cell, _ in results})
        }
        title = f"bytes of a decode step's kernels, batch {least}"
        plot_groups(path, parts, bars, title=title, y="MB a layer")


def kernel_row(launch: Launch) -> Row:
    """A kernel of a part, as plain JSON values; seconds are of all its launches."""
    shape = StepShape(launch.context, launch.batch)
    moved = moved_bytes(launch.part, launch.kernel, shape, launch.grid)
    names = (
        *("kernel", "launches", "grid", "ctas", "warps", "registers", "spill_bytes"),
        *("shared_bytes", "ctas_at_once", "load_bytes", "load_widths", "loops"),
    )
    return (
        {name: getattr(launch, name) for name in names}
        | launch.counts
        | {f"loop_{name}": count for name, count in launch.loop_counts.items()}
        | {"read_bytes": moved.read, "written_bytes": moved.written}
        | {"floor_seconds": launch.launches * sum(moved) / BANDWIDTH}
    )


def _kernels(results: Results) -> Iterator[tuple[Cell, Row]]:
    for cell, row in sorted(results, key=lambda one: (one[0]["batch"], one[0]["context"])):
        yield from ((cell, kernel) for kernel in row.get("kernels", [row]))


def _megabytes(row: Row | None) -> float | None:
    if row is None or "kernels" not in row:
        return None
    return sum(BANDWIDTH * kernel["floor_seconds"] for kernel in row["kernels"]) / 1e6


def _introduction(setup: dict[str, Any]) -> str:
    return (
        f"Kernels of one layer's decode step in the shape of Llama-3.1-8B (8 KV heads of 128 with "
        f"4 query heads each, bfloat16), compiled for sm_90 with triton {setup['triton']} and "
        f"ptxas {setup['ptxas']}. Counts are of the machine code; a second number is of those in "
        f"loops. *load bytes* is the width in which most bytes are loaded, *loads* counts all "
        f"widths. *floor us* is the time of the bytes that a kernel can't do without, each once, "
        f"at {setup['bandwidth'] / 1e12:g} TB/s. **Nothing was measured.** What a kernel reads and "
        f"writes stands in step_kernels.py."
    )


def _both(name: str) -> Callable[[Cell, Row], str]:
    def text(cell: Cell, row: Row) -> str:
        return f"{row[name]}" + (f" / {row[f'loop_{name}']}" if row["loops"] else "")

    return text


def _name(cell: Cell, row: Row) -> str:
    return row["kernel"] + (f" x{row['launches']}" if row["launches"] > 1 else "")


def _widths(cell: Cell, row: Row) -> str:
    """``"16: 8, 4: 3"``."""
    ordered = sorted(row["load_widths"].items(), key=lambda one: -int(one[0]))
    return ", ".join(f"{width}: {count}" for width, count in ordered)


_COLUMNS: tuple[Column, ...] = (
    ("part", lambda cell, row: cell["cache"]),
    ("tokens", lambda cell, row: f"{cell['context']:,}"),
    ("batch", lambda cell, row: str(cell["batch"])),
    ("kernel", _name),
    ("grid", lambda cell, row: "x".join(map(str, row["grid"]))),
    ("CTAs", lambda cell, row: f"{row['ctas']:,}"),
    ("warps", lambda cell, row: str(row["warps"])),
    ("registers", lambda cell, row: str(row["registers"])),
    ("spill bytes", lambda cell, row: str(row["spill_bytes"])),
    ("shared KiB", lambda cell, row: f"{row['shared_bytes'] / 1024:.3g}"),
    ("CTAs an SM", lambda cell, row: str(row["ctas_at_once"])),
    ("load bytes", lambda cell, row: str(row["load_bytes"])),
    ("loads", _widths),
    ("instructions", _both("instructions")),
    *((title, _both(name)) for title, name in zip(("SHFL", "STS", "BAR"), COUNTS, strict=True)),
    ("MB to move", lambda c, row: f"{(row['read_bytes'] + row['written_bytes']) / 1e6:.3g}"),
    ("floor us", lambda cell, row: f"{1e6 * row['floor_seconds']:.3g}"),
)

MEASUREMENT = MachineCodeOfStep

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
