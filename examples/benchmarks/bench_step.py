"""Where the time of a decode step goes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from step_ops import counted_ops, counted_waits
from step_parts import PARTS, Parts, PartTime, part_times, profile

from hf_kvret.benchmark.filling import Turn
from hf_kvret.benchmark.model_measurement import ModelMeasurement
from hf_kvret.benchmark.stepping import Steps, make_steps
from hf_kvret.benchmark.tables import SIZE, Column, ms, of, table_of, tenths, why_missing
from hf_kvret.evaluation.arguments import file_path, names
from hf_kvret.evaluation.measurement import Measurement, Outputs, Row
from hf_kvret.evaluation.options import option, with_default
from hf_kvret.evaluation.plots import plot_groups
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.evaluation.scripts import load_measurement, run_script
from hf_kvret_kernels._dispatch import interpreted, prefer

# A replayed step comes after at most this many: as usual, captured.
_UNTIL_REPLAYED = 4
_NONE = {"seconds": 0.0}


@dataclass(frozen=True, kw_only=True)
class Step(ModelMeasurement):
    """Where the time of a decode step goes: its parts, launches, waits of the host.

    Steps are taken as they are, without a graph: --warmup, then --steps timed ones and as many
    under torch's profiler, whose kernels are told apart by what launched them. Then the waits of
    the host are counted, in such a step and in one as bench decode takes it (a replay). On a CPU
    operations stand for kernels; with TRITON_INTERPRET=1 those of a GPU are counted, not timed.
    """

    name: ClassVar[str] = "step"
    summary: ClassVar[str] = "where the time of a decode step goes"
    examples: ClassVar[tuple[str, ...]] = (
        "python examples/benchmarks/bench_step.py --shape llama-3.1-8b --context 128K "
        "--dtype bfloat16 --caches "
        "dense,paris:top_k=100 --json step.json",
        "python examples/benchmarks/bench_step.py --modelled --kernels "
        "docs/results/kernels_sm90.json",
    )

    caches: str = with_default(ModelMeasurement, "caches", "dense,flat,paris")
    steps: int = with_default(ModelMeasurement, "steps", 4)
    warmup: int = with_default(ModelMeasurement, "warmup", 4)
    rounds: int = with_default(ModelMeasurement, "rounds", 1)
    modelled: bool = option(
        False,
        "measure nothing: model the time of a step of Llama-3.1-8B on an H200; goes with "
        "--caches, --context, --batch, --kernels and --before",
    )
    kernels: Path | None = option(
        None,
        "with --modelled: results of bench kernels --compile-only (default: compile now, about "
        "100 s)",
        kind=file_path,
        metavar="FILE",
    )
    before: Path | None = option(
        None,
        "with --modelled: the same of an earlier version, whose step stands beside",
        kind=file_path,
        metavar="FILE",
    )

    def beside(self, outputs: Outputs) -> Any:
        """With ``--modelled`` the measurement that models, which is another script."""
        return self._as_modelled() if self.modelled else self

    def check(self) -> None:
        for name in ("kernels", "before"):
            if getattr(self, name) is not None:
                raise ValueError(f"--{name} goes with --modelled: give that too, or leave it out")
        super().check()

    def _as_modelled(self) -> Measurement:
        """ValueError for options that modelling has no use for."""
        kind = load_measurement("bench step-modelled")
        shared, given = {one.name: one for one in fields(kind)}, {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "modelled" or value == one.default:
                continue
            if one.name not in shared:
                raise ValueError(
                    f"--{one.name.replace('_', '-')} with --modelled: a step of Llama-3.1-8B in "
                    "bfloat16 is modelled on an H200; leave it out"
                )
            given[one.name] = value
        if "caches" in given:
            given["caches"] = tuple(names(given["caches"]))
        return kind(**given)

    @torch.inference_mode()
    def once(self, turn: Turn) -> Row:
        """Fill, warm up, time, profile, count.

        In ``seconds`` are those of each eager step, without the profiler. ``launches`` of a part
        are kernels on CUDA, else operations that would be one. ``wait_places`` are where the host
        waits for the device in an eager step, ``later_wait_places`` in one as the cache takes it
        when it has warmed up.
        """
        model = turn.subject.model
        spare = self.warmup + 2 * self.steps + 2 + _UNTIL_REPLAYED
        with turn.filled(spare + 1) as (cache, token):
            steps = Steps(model, cache, turn.context)
            token, _, _ = steps.run(token, self.warmup)
            token, seconds, _ = steps.run(token, self.steps)
            parts = Parts()
            with parts.watching(model, cache):
                times = part_times(profile(partial(steps.run, token, self.steps), self.place))
            with parts.watching(model, cache):
                launches, waits, _ = _count(steps, token, parts)
            if not launches:
                launches = {name: part.launches / self.steps for name, part in times.items()}
            later = make_steps(turn.choice, model, cache, steps.length)
            later.run(token, _UNTIL_REPLAYED)
            _, later_waits, kind = _count(later, token, Parts())
        nothing = PartTime()
        return {
            "seconds": seconds,
            "parts": {
                name: {
                    "seconds": times.get(name, nothing).seconds / self.steps,
                    "launches": launches.get(name, 0),
                }
                for name in dict.fromkeys([*times, *launches])
            },
            "waits": sum(waits.values()),
            "wait_places": waits,
            "later_kind": kind,
            "later_waits": sum(later_waits.values()),
            "later_wait_places": later_waits,
            "not_replayed": later.reason,
        }

    def row(self, cell: Cell, samples: Mapping[int, Sequence[Row]]) -> Row:
        """Seconds and launches of each part of a step; waits of the host and where they are."""
        rounds = samples[self.built]
        parts = rounds[-1]["parts"]
        for name, part in parts.items():
            part["seconds"] = median(one["parts"].get(name, _NONE)["seconds"] for one in rounds)
        launches = sum(part["launches"] for part in parts.values())
        return rounds[-1] | {
            "seconds": median(value for one in rounds for value in one["seconds"]),
            "busy_seconds": sum(part["seconds"] for part in parts.values()),
            "launches": launches,
            "launches_a_layer": launches / self.built,
            "launches_are": _launches_are(self.place),
        }

    @classmethod
    def table(cls, results: Results) -> str:
        """A table of whole steps, one of their parts, and where the host waits."""
        notes = [
            f"- {cell['cache']}, {cell['context']:,}: waits in {place}"
            for cell, row in results
            if why_missing(row) is None
            for place in row["wait_places"] | row["later_wait_places"]
        ]
        are = {row["launches_are"] for _, row in results if "launches_are" in row}
        notes += [f"- launches are {one}" for one in sorted(are)]
        measured = [(cell, row) for cell, row in results if why_missing(row) is None]
        tables = [
            table_of(_WHOLE, results, reason=len(_SIZE)),
            "Milliseconds at work (launches) of each part:",
            table_of(_BY_PART, measured),
            "\n".join(notes),
        ]
        return "\n\n".join(part for part in tables if part)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        """Milliseconds of the parts: a group of bars a part, a bar for each cache and size."""
        bars = {
            f"{cell['cache']}, {cell['context']:,} x {cell['batch']}": [
                1e3 * row["parts"][name]["seconds"] if name in row["parts"] else None
                for name in PARTS
            ]
            for cell, row in results
            if "parts" in row
        }
        title = f"{results.setup['shape']}: parts of a decode step"
        plot_groups(path, PARTS, bars, title=title, y="ms")


def _part(name: str) -> Column:
    def text(cell: Cell, row: Row) -> str:
        part = row["parts"].get(name)
        return "-" if part is None else f"{ms(part['seconds'])} ({part['launches']:g})"

    return name, text


_SIZE = SIZE[:3]
_WHOLE: tuple[Column, ...] = (
    *_SIZE,
    ("ms a step, eager", of(ms, "seconds")),
    ("busy ms", of(ms, "busy_seconds")),
    ("busy", of(lambda row: f"{row['busy_seconds'] / row['seconds']:.0%}")),
    ("launches", of("{:g}".format, "launches")),
    ("launches a layer", of(tenths, "launches_a_layer")),
    ("waits", of(str, "waits")),
    ("later steps", of(str, "later_kind")),
    ("their waits", of(str, "later_waits")),
)
_BY_PART: tuple[Column, ...] = (*_SIZE, *map(_part, PARTS))


def _count(
    steps: Steps, token: torch.Tensor, parts: Parts
) -> tuple[dict[str, float], dict[str, int], str]:
    """Take a step; launches by part, none on CUDA, waits of the host by place, and its kind."""
    if token.device.type == "cuda":
        with counted_waits() as found:
            _, taken = steps.take(token)
        return {}, dict(found), taken.kind
    with ExitStack() as stack:
        if interpreted():
            stack.enter_context(prefer("triton"))
        ops = stack.enter_context(counted_ops(lambda: parts.now))
        _, taken = steps.take(token)
    return dict(ops.launches), dict(ops.waits), taken.kind


def _launches_are(device: torch.device) -> str:
    if device.type == "cuda":
        return "kernels"
    return "operations, with Triton's kernels" if interpreted() else "operations of the CPU's way"


MEASUREMENT = Step

if __name__ == "__main__":
    sys.exit(run_script(MEASUREMENT))
