"""``hf-kvret bench decode``: time of one decode step behind a long context."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.benchmark.checks import CheckFailed
from hf_kvret.benchmark.filling import serving
from hf_kvret.benchmark.floors import Selections, decode_floor, selections
from hf_kvret.benchmark.measure import Bench, Measure, Turn
from hf_kvret.benchmark.peaks import device_peak, restart_peak
from hf_kvret.benchmark.rows import TimedSample, timed_row
from hf_kvret.benchmark.stepping import (
    DenseGraphSteps,
    Steps,
    Taken,
    count_steps,
    make_steps,
)
from hf_kvret.benchmark.tables import plot_seconds, timing_table
from hf_kvret.benchmark.timing import StepClock
from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.results import Cell, Results


@dataclass(frozen=True)
class DecodeSample(TimedSample):
    """One round of steps.

    Attributes:
        selected: what a timed step selected.
        taken: the kinds of the timed steps.
        reason: why a retrieval cache's steps are not replayed; None where they are.
        device_peak_bytes: the most device memory beyond the weights in this turn; on a CPU the
            bytes of the cache.
    """

    selected: Selections
    taken: list[Taken]
    reason: str | None
    device_peak_bytes: int


class Decode(Measure):
    """Time of a decode step behind a context of given length."""

    name: ClassVar[str] = "decode"
    summary: ClassVar[str] = "time of a decode step"
    description: ClassVar[str] = (
        "Time of a decode step behind a context of given length. Each round fills every cache "
        "anew, takes --warmup steps and times --steps steps; the caches take turns, --rounds "
        "times. A row is the median over all timed steps, with quartiles. Steps of retrieval "
        "caches are replayed from a CUDA graph where they can be; graph=false, as in "
        "paris:graph=false, measures them as they are without it."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench decode --shape llama-3.1-8b --context 32K,128K --batch 1,8 --dtype "
        "bfloat16 --caches full,dense,dense-graph,flat,paris --json decode.json",
    )

    @torch.inference_mode()
    def once(self, turn: Turn) -> DecodeSample:
        """Fill, warm up, time; CheckFailed when a retrieval cache retrieved nothing."""
        bench, model = turn.bench, turn.subject.model
        base = restart_peak(bench.device)
        cache = turn.choice.make(model.config, turn.context + bench.warmup + bench.steps + 1)
        with serving(model, cache):
            token = turn.filled(cache)
            steps = make_steps(turn.choice, model, cache, turn.context)
            token, pace = _warm_up(steps, token, bench.warmup)
            before = selections(cache)
            seconds, taken = _time(steps, token, bench.steps_within(pace))
            if isinstance(steps, DenseGraphSteps):
                steps.finish()
        chosen = Selections()
        if isinstance(cache, RetrievalCache):
            after = selections(cache)
            if after.rows == before.rows:
                raise CheckFailed(
                    f"{turn.choice.name}: {len(seconds)} steps behind {turn.context} tokens "
                    "retrieved nothing; nothing was reported"
                )
            chosen = after.since(before, len(seconds))
        usage = turn.usage(cache, steps.length)
        floor = decode_floor(
            turn.subject.weights, cache, usage, turn.batch, chosen, turn.choice.on_host
        )
        peak = device_peak(bench.device, base)
        held = usage.device_bytes if peak is None else peak
        return DecodeSample(seconds, floor, usage, chosen, taken, steps.reason, held)

    def row(
        self, bench: Bench, cell: Cell, samples: Mapping[int, Sequence[DecodeSample]]
    ) -> dict[str, Any]:
        """Median and quartiles of a step, tokens a second, bytes held and read, the floor.

        ``steps`` counts the timed steps by kind, ``seconds_by_kind`` has the median of each.
        """
        rounds = samples[bench.subjects[0].layers]
        return timed_row(bench, cell["batch"], samples) | {
            "selected_rows": rounds[-1].selected.rows,
            "bus_rows": rounds[-1].selected.bus_rows,
            "flushed_tokens": sum(step.flushed for one in rounds for step in one.taken),
            "device_peak_bytes": max(one.device_peak_bytes for one in rounds),
            "steps": count_steps([step for one in rounds for step in one.taken]),
            "seconds_by_kind": _medians(rounds),
            "not_replayed": rounds[-1].reason,
        }

    def table(self, results: Results) -> str:
        return timing_table(results, "ms a step")

    def plot(self, path: Path, results: Results) -> None:
        plot_seconds(path, results, "time of a decode step")


def _warm_up(steps: Steps, token: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    """The token to go on with, and the seconds of the last of ``count`` steps; 0 for none."""
    pace = 0.0
    for _ in range(count):
        clock = StepClock(token.device)
        clock.mark()
        token = steps.take(token)[0].argmax(-1)
        clock.mark()
        pace = clock.seconds()[0]
    return token, pace


def _time(steps: Steps, token: torch.Tensor, count: int) -> tuple[list[float], list[Taken]]:
    taken = []
    clock = StepClock(token.device)
    clock.mark()
    for _ in range(count):
        logits, step = steps.take(token)
        token = logits.argmax(-1)
        clock.mark()
        taken.append(step)
    return clock.seconds(), taken


def _medians(rounds: Sequence[DecodeSample]) -> dict[str, float]:
    """Median seconds of the timed steps by label."""
    by_label: dict[str, list[float]] = {}
    for sample in rounds:
        for seconds, step in zip(sample.seconds, sample.taken, strict=True):
            by_label.setdefault(step.label, []).append(seconds)
    return {label: statistics.median(values) for label, values in by_label.items()}
