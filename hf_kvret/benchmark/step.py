"""``hf-kvret bench step``: where the time of a decode step goes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.benchmark.filling import serving
from hf_kvret.benchmark.measure import Bench, Measure, Turn
from hf_kvret.benchmark.step_ops import counted_ops, counted_waits
from hf_kvret.benchmark.step_parts import Parts
from hf_kvret.benchmark.step_tables import plot_parts, step_table
from hf_kvret.benchmark.step_trace import PartTime, part_times, profile
from hf_kvret.benchmark.stepping import Steps, make_steps
from hf_kvret.benchmark.timing import StepClock
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret_kernels._dispatch import interpreted, prefer

# A replayed step comes after at most this many: as usual, captured.
_UNTIL_REPLAYED = 4


@dataclass(frozen=True)
class StepSample:
    """One turn.

    Attributes:
        seconds: of each eager step, without the profiler.
        parts: time and launches of all profiled steps by part.
        launches: of one eager step by part: kernels on CUDA, else operations that would be one.
        waits: of the host for the device in one eager step, by place.
        later_waits: the same in one step as the cache takes it when it has warmed up.
        later_kind: how that step was taken.
        reason: why it was not replayed; None where it was, or nothing was to be replayed.
    """

    seconds: list[float]
    parts: dict[str, PartTime]
    launches: dict[str, float]
    waits: dict[str, int]
    later_waits: dict[str, int]
    later_kind: str
    reason: str | None


class Step(Measure):
    """Where the time of a decode step goes: its parts, launches, waits of the host."""

    name: ClassVar[str] = "step"
    summary: ClassVar[str] = "where the time of a decode step goes"
    description: ClassVar[str] = (
        "Where the time of a decode step goes: its parts, launches, waits of the host. Steps "
        "are taken as they are, without a graph: --warmup, then --steps timed ones and as many "
        "under torch's profiler, whose kernels are told apart by what launched them. Then the "
        "waits of the host are counted, in such a step and in one as bench decode takes it (a "
        "replay). On a CPU operations stand for kernels; with TRITON_INTERPRET=1 those of a GPU "
        "are counted, not timed."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench step --shape llama-3.1-8b --context 128K --dtype bfloat16 --caches "
        "dense,paris:top_k=100 --json step.json",
    )

    @torch.inference_mode()
    def once(self, turn: Turn) -> StepSample:
        """Fill, warm up, time, profile, count."""
        bench, model, choice = turn.bench, turn.subject.model, turn.choice
        spare = bench.warmup + 2 * bench.steps + 2 + _UNTIL_REPLAYED
        cache = choice.make(model.config, turn.context + spare + 1)
        with serving(model, cache):
            token = turn.filled(cache)
            steps = Steps(model, cache, turn.context)
            for _ in range(bench.warmup):
                token = steps.take(token)[0].argmax(-1)
            clock = StepClock(model.device)
            clock.mark()
            for _ in range(bench.steps):
                token = steps.take(token)[0].argmax(-1)
                clock.mark()
            seconds = clock.seconds()
            parts = Parts()
            with parts.watching(model, cache):
                work = partial(_several, steps, token, bench.steps)
                times = part_times(profile(work, bench.device))
            with parts.watching(model, cache):
                launches, waits, _ = _count(steps, token, parts)
            if not launches:
                launches = {name: part.launches / bench.steps for name, part in times.items()}
            later = make_steps(choice, model, cache, steps.length)
            for _ in range(_UNTIL_REPLAYED):
                later.take(token)
            _, later_waits, kind = _count(later, token, Parts())
        return StepSample(seconds, times, launches, waits, later_waits, kind, later.reason)

    def row(
        self, bench: Bench, cell: Cell, samples: Mapping[int, Sequence[StepSample]]
    ) -> dict[str, Any]:
        """Seconds and launches of each part of a step; waits of the host and where they are."""
        taken = samples[bench.subjects[0].layers]
        last = taken[-1]
        middle = statistics.median(value for one in taken for value in one.seconds)
        parts = {
            name: {
                "seconds": statistics.median(_seconds(one, name) / bench.steps for one in taken),
                "launches": last.launches.get(name, 0),
            }
            for name in dict.fromkeys([*last.parts, *last.launches])
        }
        launches = sum(last.launches.values())
        return {
            "seconds": middle,
            "parts": parts,
            "busy_seconds": sum(part["seconds"] for part in parts.values()),
            "launches": launches,
            "launches_a_layer": launches / bench.subjects[0].layers,
            "launches_are": _launches_are(bench.device),
            "waits": sum(last.waits.values()),
            "wait_places": last.waits,
            "later_kind": last.later_kind,
            "later_waits": sum(last.later_waits.values()),
            "later_wait_places": last.later_waits,
            "not_replayed": last.reason,
        }

    def table(self, results: Results) -> str:
        return step_table(results)

    def plot(self, path: Path, results: Results) -> None:
        plot_parts(path, results)


def _several(steps: Steps, token: torch.Tensor, count: int) -> None:
    for _ in range(count):
        token = steps.take(token)[0].argmax(-1)


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


def _seconds(sample: StepSample, part: str) -> float:
    return sample.parts[part].seconds if part in sample.parts else 0.0
