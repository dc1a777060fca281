"""``hf-kvret bench kernels --compile-only``: machine code of a decode step's kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import turns
from compile_step import check_tools, compile_parts, tool_versions
from kernel_launch import Launch
from machine_model import H200
from machine_tables import machine_table, plot_machine
from step_kernels import LEAST_CONTEXT, PARTS, StepShape, told_steps
from step_work import work_of

from hf_kvret.evaluation import common_options as common
from hf_kvret.evaluation.arguments import file_path, known_names
from hf_kvret.evaluation.measurement import Progress, Row
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.scripts import run_script


@dataclass(frozen=True, kw_only=True)
class MachineCodeOfStep(turns.TimedTogether):
    """Machine code of the kernels of a decode step, and how long it may take to issue."""

    command: ClassVar[str] = "bench"
    name: ClassVar[str] = "machine-code"
    summary: ClassVar[str] = "machine code of a decode step's kernels, compiled without a GPU"
    description: ClassVar[str] = (
        "Kernels of a decode step in the shape of Llama-3.1-8B, compiled for sm_90; no GPU is "
        "needed. A row says of each kernel of a part what its machine code consists of, and how "
        "long issuing it and moving its bytes take in a model of an H200. Nothing is measured."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "python examples/benchmarks/bench_machine_code.py --parts merge,window --context 128K "
        "--batch 1",
        "hf-kvret bench kernels --compile-only --json kernels_sm90.json",
    )

    parts: tuple[str, ...] = option(
        tuple(PARTS), f"of a step: {', '.join(PARTS)} (default: all)", kind=known_names(PARTS)
    )
    context: tuple[int, ...] = common.context_option((131_072, 1 << 20), "tokens of a sequence")
    batch: tuple[int, ...] = common.batch_option((1, 8))
    before: Path | None = option(
        None,
        "results of an earlier run: its times stand beside those of the same kernels",
        kind=file_path,
        metavar="FILE",
    )

    def check(self) -> None:
        """Errors as of ``check_tools``; ValueError for a short context, or other earlier results.

        Those are of another bench, or modelled with other figures of the chip.
        """
        check_tools()
        _ = self._earlier
        if min(self.context) < LEAST_CONTEXT:
            raise ValueError(
                f"--context {min(self.context)}: give at least {LEAST_CONTEXT:,} tokens, for which "
                "the parts of a step are described"
            )

    def setup(self) -> dict[str, Any]:
        return chip_figures() | tool_versions() | {"steps": told_steps()}

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
        rows: list[Row] = []
        for cell in group:
            kernels = [kernel_row(one) for one in launches if one.part == cell["cache"]]
            rows.append({"kernels": [self._beside_earlier(cell, one) for one in kernels]})
        return rows

    def _beside_earlier(self, cell: Cell, kernel: Row) -> Row:
        """With the seconds that ``before`` has of the same kernel; None where it has none."""
        if self._earlier is None:
            return kernel
        row = self._earlier.find(cell) or {}
        same = [one for one in row.get("kernels", ()) if one["kernel"] == kernel["kernel"]]
        return kernel | {
            f"{name}_before": same[0][name] if same else None
            for name in ("issue_seconds", "dram_seconds")
        }

    @cached_property
    def _earlier(self) -> Results | None:
        return None if self.before is None else load_kernels("--before", self.before)

    @classmethod
    def table(cls, results: Results) -> str:
        return machine_table(results)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        plot_machine(path, results)


def load_kernels(option: str, file: Path) -> Results:
    """Results of this bench, modelled with the figures of now; ``option`` named the file.

    Raises:
        FileNotFoundError, ValueError: no file, results of another bench, or of other figures.
    """
    results = Results.load(file)
    if results.name != MachineCodeOfStep.title():
        raise ValueError(f"{option} {file} holds {results.name}: give {MachineCodeOfStep.title()}")
    if any(results.setup.get(name) != value for name, value in chip_figures().items()):
        raise ValueError(
            f"{option} {file} was modelled with other figures of the chip than those in "
            "machine_model.py: make it again from the code that it is of"
        )
    return results


def chip_figures() -> dict[str, Any]:
    """What times depend on, as plain JSON values."""
    figures = ("multiprocessors", "clock", "bandwidth")
    chip = {"chip": H200.name} | {name: getattr(H200, name) for name in figures}
    return chip | {"rates": dict(H200.rates)}


def kernel_row(launch: Launch) -> Row:
    """A kernel of a part, as plain JSON values; seconds are of all its launches."""
    shape = StepShape(launch.context, launch.batch)
    work = work_of(launch.part, launch.kernel, shape, launch.grid)
    blocks = (*launch.outside_loops, *launch.loops)
    counts = ("instructions", "shuffles", "shared_stores", "barriers")
    kept = (
        *("kernel", "launches", "grid", "ctas", "warps", "registers", "spill_bytes"),
        *("shared_bytes", "ctas_at_once", "load_bytes", "load_widths"),
    )
    return (
        {name: getattr(launch, name) for name in kept}
        | {name: sum(getattr(block, name) for block in blocks) for name in counts}
        | {f"loop_{name}": launch.in_loops(name) for name in counts}
        | {"last_instructions": sum(one.instructions for one in blocks if one.of_last)}
        | {"loops": len(launch.loops), "trips": list(work.trips), "last_ctas": work.last_ctas}
        | {"read_bytes": work.read_bytes, "written_bytes": work.written_bytes}
        | {
            "issue_seconds": launch.issue_seconds(work.trips, work.last_ctas),
            "dram_seconds": launch.launches * H200.dram_seconds(work.moved_bytes),
        }
    )


MEASUREMENT = MachineCodeOfStep

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
