"""``hf-kvret bench step --modelled``: the time of a decode step on an H200, without a GPU."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import turns
from bench_machine_code import MachineCodeOfStep, chip_figures, kernel_row, load_kernels
from compile_step import check_tools, compile_parts, tool_versions
from machine_model import ASSUMPTIONS
from step_kernels import LEAST_CONTEXT, STEPS, StepShape, told_steps
from step_model import FULL, ModelSizes, full_row, launches_of, step_row
from step_tables import plot_step, step_table

from hf_kvret.benchmark.shapes import load_shape
from hf_kvret.evaluation import common_options as common
from hf_kvret.evaluation.arguments import file_path, known_names
from hf_kvret.evaluation.measurement import Progress, Row
from hf_kvret.evaluation.options import option
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.scripts import run_script

CACHES = (FULL, *STEPS)
SHAPE = "llama-3.1-8b"


@dataclass(frozen=True, kw_only=True)
class ModelledStep(turns.TimedTogether):
    """The modelled time of a whole decode step: matrices, small kernels, the cache's kernels."""

    command: ClassVar[str] = "bench"
    name: ClassVar[str] = "step-modelled"
    summary: ClassVar[str] = "modelled time of a decode step on an H200, without a GPU"
    description: ClassVar[str] = (
        "The time of a decode step of Llama-3.1-8B in bfloat16 on an H200, modelled from the "
        "model's matrices, its own small kernels and the machine code of the cache's kernels. "
        "Times are ranges, since what a launch costs is assumed. Nothing is measured."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench step --modelled --kernels docs/results/kernels_sm90.json",
        "hf-kvret bench step --modelled --kernels new.json --before old.json --json step.json",
    )

    caches: tuple[str, ...] = option(
        CACHES,
        f"of {', '.join(CACHES)}; {FULL} is full attention (default: all)",
        kind=known_names(CACHES),
    )
    context: tuple[int, ...] = common.context_option((131_072, 1 << 20), "tokens of a sequence")
    batch: tuple[int, ...] = common.batch_option()
    kernels: Path | None = option(
        None,
        "results of bench kernels --compile-only (default: compile now, about 100 s)",
        kind=file_path,
        metavar="FILE",
    )
    before: Path | None = option(
        None,
        "the same of an earlier version: its step stands beside",
        kind=file_path,
        metavar="FILE",
    )

    def check(self) -> None:
        """Before anything is compiled.

        Raises:
            ModuleNotFoundError, FileNotFoundError: kernels can't be compiled here, and none are
                given; no such file.
            ValueError: a short context; unknown caches; files without what is asked for, or of
                other figures.
        """
        if min(self.context) < LEAST_CONTEXT:
            raise ValueError(
                f"--context {min(self.context)}: give at least {LEAST_CONTEXT:,} tokens, for which "
                "the parts of a step are described"
            )
        unknown = [cache for cache in self.caches if cache not in CACHES]
        if unknown or not self.caches:
            raise ValueError(
                f"--caches {','.join(self.caches)}: steps are described of {', '.join(CACHES)}"
            )
        if self.kernels is None and self._asked:
            check_compiler()
        self._try("--kernels", self.kernels, self._saved)
        self._try("--before", self.before, self._earlier)

    def _try(self, name: str, file: Path | None, saved: Results | None) -> None:
        """ValueError where results lack a part of a step that is asked for."""
        if saved is None:
            return
        try:
            for cell in self.cells():
                self._row(cell, saved)
        except ValueError as error:
            raise ValueError(f"{name} {file}: {error}") from error

    def setup(self) -> dict[str, Any]:
        saved = self._saved
        made = tool_versions() if saved is None and self._asked else {}
        if saved is not None:
            made = {name: saved.setup[name] for name in ("triton", "ptxas")}
        files = {"kernels": self.kernels, "before": self.before}
        return (
            chip_figures()
            | {name: [one.quick, one.slow] for name, one in ASSUMPTIONS.items()}
            | {"shape": SHAPE, **made}
            | {name: None if file is None else _named(file) for name, file in files.items()}
        )

    def cells(self) -> list[Cell]:
        return [
            {"cache": cache, "context": context, "batch": batch}
            for context in self.context
            for batch in self.batch
            for cache in self.caches
        ]

    def rows(self, group: Sequence[Cell], progress: Progress) -> list[Row]:
        """Of all caches of a size; one process compiles their kernels, where no file has them."""
        kernels = self._saved
        if kernels is None:
            kernels = Results(MachineCodeOfStep.title(), chip_figures() | {"steps": told_steps()})
            context, batch = group[0]["context"], group[0]["batch"]
            if self._asked:
                progress.say(f"{len(self._asked)} parts at {context:,} tokens: compiling")
                launches = compile_parts(self._asked, context, batch)
                for part in self._asked:
                    found = [kernel_row(one) for one in launches if one.part == part]
                    cell = {"cache": part, "context": context, "batch": batch}
                    kernels.add(cell, {"kernels": found})
        rows = []
        for cell in group:
            row = self._row(cell, kernels)
            assert row is not None, "parts of now are those of this version"
            if self._earlier is not None:
                row["before"] = self._row(cell, self._earlier)
            rows.append(row)
        return rows

    def _row(self, cell: Cell, kernels: Results) -> Row | None:
        """None where ``kernels`` know no such method."""
        if cell["cache"] == FULL:
            return full_row(self._model, cell["context"], cell["batch"])
        shape = StepShape(cell["context"], cell["batch"])
        return step_row(cell["cache"], kernels, self._model, shape)

    @property
    def _asked(self) -> list[str]:
        """Parts of the caches."""
        steps = (STEPS[cache].launched.parts for cache in self.caches if cache != FULL)
        return list(dict.fromkeys(part for parts in steps for part in parts))

    @cached_property
    def _model(self) -> ModelSizes:
        return ModelSizes.of(load_shape(SHAPE).config)

    @cached_property
    def _saved(self) -> Results | None:
        """ValueError for caches that it does not know."""
        if self.kernels is None:
            return None
        results = load_kernels("--kernels", self.kernels)
        unknown = [one for one in self.caches if one != FULL and launches_of(results, one) is None]
        if unknown:
            raise ValueError(
                f"--kernels {self.kernels} does not tell what a step of {', '.join(unknown)} "
                "launches: make it again with hf-kvret bench kernels --compile-only, or leave "
                "them out of --caches"
            )
        return results

    @cached_property
    def _earlier(self) -> Results | None:
        return None if self.before is None else load_kernels("--before", self.before)

    @classmethod
    def table(cls, results: Results) -> str:
        return step_table(results)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        plot_step(path, results)


def check_compiler() -> None:
    """As ``compile_step.check_tools``; the error also names the way without triton."""
    try:
        check_tools()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise type(error)(
            f"{error}. Or give the machine code of an earlier run: "
            "--kernels docs/results/kernels_sm90.json"
        ) from error


def _named(file: Path) -> str:
    """A file by name and content: rows of another one are not gone on with."""
    return f"{file.name} ({hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"


MEASUREMENT = ModelledStep

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
