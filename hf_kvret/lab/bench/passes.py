"""``hf-kvret bench decode``: time of one decode step behind a long context."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.filling import Turn
from hf_kvret.lab.bench.floors import Selections, decode_floor, selections
from hf_kvret.lab.bench.limits import PeakDeviceMemory
from hf_kvret.lab.bench.model_measurement import ModelMeasurement, TimedSample, timed_row
from hf_kvret.lab.bench.stepping import attention_clock, make_steps
from hf_kvret.lab.bench.tables import plot_contexts, timing_table
from hf_kvret.lab.evaluate.measurement import CheckFailed, Outputs, Row
from hf_kvret.lab.program.arguments import known_names
from hf_kvret.lab.program.options import option
from hf_kvret.lab.program.scripts import load_measurement
from hf_kvret.lab.report.results import Cell, Results

# A compiled step is compiled in the first, and its graph is recorded in the next two.
_LEAST_COMPILED_WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Decode(ModelMeasurement):
    """Time of a decode step behind a context of given length.

    Each round fills every cache anew, takes --warmup steps and times --steps steps; the caches take
    turns, --rounds times. A row is the median over all timed steps, with quartiles. Steps of
    retrieval caches are replayed from a CUDA graph where they can be; graph=false, as in
    paris:graph=false, measures them as they are without it.
    """

    decodes: ClassVar[bool] = True
    name: ClassVar[str] = "decode"
    summary: ClassVar[str] = "time of a decode step"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench decode --shape llama-3.1-8b --context 32K,128K --batch 1,8 --dtype "
        "bfloat16 --caches full,dense,dense-graph,flat,paris --json decode.json",
    )

    opponents: tuple[str, ...] = option(
        (), "llama.cpp: time it too, in a checkout", kind=known_names(["llama.cpp"], none=True)
    )

    def beside(self, outputs: Outputs) -> Any:
        """With opponents the measurement that has them, which is a script."""
        return load_measurement("bench llama-cpp")(**vars(self)) if self.opponents else self

    def check(self) -> None:
        super().check()
        if "static-compile" in self.choices and self.warmup < _LEAST_COMPILED_WARMUP:
            raise ValueError(
                f"--warmup {self.warmup}: static-compile compiles and records in its first steps, "
                f"give at least {_LEAST_COMPILED_WARMUP}"
            )

    @torch.inference_mode()
    def once(self, turn: Turn) -> TimedSample:
        """Fill, warm up, time; CheckFailed when a retrieval cache retrieved nothing."""
        peak = PeakDeviceMemory(self.place)
        with turn.filled(self.warmup + self.steps + 1) as (cache, token):
            steps = make_steps(turn.choice, turn.subject.model, cache, turn.context)
            token, paces, _ = steps.run(token, self.warmup)
            before = selections(cache)
            count = self.steps_within(paces[-1] if paces else 0.0)
            with attention_clock(turn.subject.model) as clock:
                _, seconds, taken = steps.run(token, count)
            steps.finish()
        chosen = Selections()
        if isinstance(cache, RetrievalCache):
            after = selections(cache)
            if after.rows == before.rows and cache.options.retrieves:
                raise CheckFailed(
                    f"{turn.choice.name}: {len(seconds)} steps behind {turn.context} tokens "
                    "retrieved nothing; nothing was reported"
                )
            chosen = after.since(before, len(seconds))
        usage = turn.usage(cache, steps.length)
        floor = decode_floor(
            turn.subject.weights, cache, usage, turn.batch, chosen, turn.choice.on_host
        )
        held = peak.growth()
        more = {
            "selected_rows": chosen.rows,
            "bus_rows": chosen.bus_rows,
            "flushed_tokens": sum(step.flushed for step in taken),
            # On a CPU, where no peak is known, the bytes of the cache.
            "device_peak_bytes": usage.device_bytes if held is None else held,
            "steps": [step.label for step in taken],
            "not_replayed": steps.reason,
            "attention_seconds": median(clock.seconds()[::2] or [0.0]) or None,
        }
        return TimedSample(seconds, floor, usage, more)

    def row(self, cell: Cell, samples: Mapping[int, Sequence[TimedSample]]) -> Row:
        """Median and quartiles of a step, tokens a second, bytes held and read, the floor.

        ``steps`` counts the timed steps by kind, ``seconds_by_kind`` has the median of each.
        """
        rounds = samples[self.built]
        by_kind: dict[str, list[float]] = defaultdict(list)
        for one in rounds:
            for kind, seconds in zip(one.more["steps"], one.seconds, strict=True):
                by_kind[kind].append(seconds)
        counts = Counter({kind: len(seconds) for kind, seconds in by_kind.items()})
        return timed_row(self, cell["batch"], samples) | {
            "flushed_tokens": sum(one.more["flushed_tokens"] for one in rounds),
            "device_peak_bytes": max(one.more["device_peak_bytes"] for one in rounds),
            "steps": dict(counts.most_common()),
            "seconds_by_kind": {kind: median(seconds) for kind, seconds in by_kind.items()},
        }

    @classmethod
    def table(cls, results: Results) -> str:
        return timing_table(results, "ms a step")

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        plot_contexts(path, results, "time of a decode step", "ms", "seconds")
