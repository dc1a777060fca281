"""``hf-kvret bench decode --opponents llama.cpp``: steps of caches and of llama.cpp."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

from llama_bench import (
    FILES,
    LLAMA_CPP,
    ROW_TYPES,
    LlamaBench,
    check_architecture,
    find_gguf,
    find_program,
    find_quantizer,
)

from hf_kvret.lab.bench.filling import Subject
from hf_kvret.lab.bench.limits import Need, shortage
from hf_kvret.lab.bench.model_measurement import Line
from hf_kvret.lab.bench.passes import Decode
from hf_kvret.lab.bench.tables import label
from hf_kvret.lab.bench.timed import ms
from hf_kvret.lab.evaluate.measurement import Outputs, Progress, Row
from hf_kvret.lab.program.scripts import run_script
from hf_kvret.lab.report.results import Cell, Results


@dataclass(frozen=True)
class LlamaTurn:
    """llama.cpp with one type of rows at one context, on one model."""

    bench: LlamaBench
    subject: Subject
    context: int


@dataclass(frozen=True, kw_only=True)
class BesideLlamaCpp(Decode):
    """Time of a decode step of caches, and of llama.cpp with the same model on the same CPU.

    As bench decode, with two rows more for each context: llama.cpp with keys and values of 16 bits
    and of 8. Its llama-bench is on PATH, or LLAMA_BENCH names it.
    """

    name: ClassVar[str] = "llama-cpp"
    summary: ClassVar[str] = "time of a decode step, beside llama.cpp"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench decode --opponents llama.cpp --device cpu --shape qwen3-0.6b "
        "--dtype bfloat16 --context 4K,16K --caches dense-cpp,paris",
    )
    smallest: ClassVar[str] = (
        "--device cpu --context 256 --steps 3 --warmup 1 --rounds 1 --caches dense"
    )

    opponents: tuple[str, ...] = (LLAMA_CPP,)
    """No option: this is what they are."""

    @cached_property
    def benches(self) -> dict[tuple[str, str], LlamaBench]:
        """llama.cpp by weights and the name in cells; beside codes its rows are codes too."""
        program, folder = find_program(), Path(self._folder.name)
        return {
            (weights, f"{LLAMA_CPP} {kind}"): LlamaBench(program, folder, kind, weights)
            for weights in self.weights or ("",)
            for kind in (("q8_0",) if weights in FILES else ROW_TYPES)
        }

    def bench_of(self, cell: Cell) -> LlamaBench:
        """The one of a cell that is no cache's."""
        return self.benches[cell.get("weights", ""), cell["cache"]]

    @cached_property
    def _folder(self) -> TemporaryDirectory[str]:
        """Where models are written."""
        return TemporaryDirectory(prefix="hf-kvret-")

    def beside(self, outputs: Outputs) -> Self:
        return self

    def surroundings(self) -> TemporaryDirectory[str]:
        return self._folder

    def check(self) -> None:
        if self.place.type != "cpu":
            raise ValueError(
                f"--opponents {LLAMA_CPP} is measured on a CPU, and the model is on "
                f"{self.device!r}: give --device cpu, or leave it out"
            )
        if self.batch != (1,):
            raise ValueError(
                f"--opponents {LLAMA_CPP} decodes one sequence: give --batch 1, or leave it out"
            )
        check_architecture(self.whole.config, self.shape)
        find_program()
        if set(self.weights) & set(FILES):
            find_quantizer()
        find_gguf()
        super().check()

    def row_names(self, weights: str) -> list[str]:
        return [*self.choices, *(name for one, name in self.benches if one == weights)]

    def fill_of(self, cell: Cell) -> str:
        return super().fill_of(cell) if cell["cache"] in self.choices else "prefill"

    def check_row(self, cell: Cell, progress: Progress) -> Row:
        if cell["cache"] in self.choices:
            return super().check_row(cell, progress)
        short = self.shortage(cell)
        return self.lacking(
            cell, {"check": "not checked"} if short is None else {"out_of_memory": short}
        )

    def shortage(self, cell: Cell) -> str | None:
        if cell["cache"] in self.choices:
            return super().shortage(cell)
        bench, length = self.bench_of(cell), cell["context"] + self.steps
        need = bench.needed_bytes(self.subjects_of(cell)[0], length)
        return shortage(Need(need, 0), self.place)

    def turn(self, cell: Cell, subject: Subject) -> Any:
        if cell["cache"] in self.choices:
            return super().turn(cell, subject)
        return LlamaTurn(self.bench_of(cell), subject, cell["context"])

    def once(self, turn: Any) -> Any:
        if isinstance(turn, LlamaTurn):
            return turn.bench.sample(turn.subject, turn.context, self.steps)
        return super().once(turn)

    def row(self, cell: Cell, samples: Mapping[int, Sequence[Any]]) -> Row:
        if cell["cache"] in self.choices:
            return super().row(cell, samples)
        return self.bench_of(cell).row(self, samples)

    @classmethod
    def table(cls, results: Results) -> str:
        """As of bench decode, with slopes and the build of llama.cpp below it."""
        table, notes = super().table(results), [*slope_notes(results), *build_notes(results)]
        if not notes:
            return table
        listed = table.splitlines()[-1].startswith("- ")
        return "\n".join([table, *([] if listed else [""]), *notes])


def slope_notes(results: Results) -> list[str]:
    """Lines below a table: what 1,024 tokens more add to the time, for what has several contexts.

    Measured and scaled seconds apart.
    """
    seconds_of: dict[tuple[str, int, str], dict[int, float]] = {}
    for cell, row in results:
        for prefix, numbers in (("", row), ("scaled ", row.get("scaled") or {})):
            if numbers.get("seconds") is not None:
                points = seconds_of.setdefault((prefix, cell["batch"], label(cell)), {})
                points[cell["context"]] = numbers["seconds"]
    slopes_of: dict[tuple[str, int, int, int], list[str]] = {}
    for (prefix, batch, cache), points in seconds_of.items():
        if len(points) > 1:
            slope = 1024 * Line.through(points).slope
            span = (prefix, batch, min(points), max(points))
            slopes_of.setdefault(span, []).append(f"{cache} {ms(slope)}")
    return [
        f"- {prefix}ms a step for 1K of context more, {few:,} to {many:,} tokens, batch {batch}: "
        + ", ".join(slopes)
        for (prefix, batch, few, many), slopes in slopes_of.items()
    ]


def build_notes(results: Results) -> list[str]:
    """Lines below a table: which builds of llama.cpp were measured."""
    builds = dict.fromkeys(row["llama_cpp"] for _, row in results if "llama_cpp" in row)
    return [f"- {LLAMA_CPP}: build {build}" for build in builds]


MEASUREMENT = BesideLlamaCpp

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
