"""``hf-kvret bench decode``: time of one decode step behind a long context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.benchmark.checks import CheckFailed
from hf_kvret.benchmark.filling import feed, serving
from hf_kvret.benchmark.floors import Selections, decode_floor, selections
from hf_kvret.benchmark.graphs import GraphStep
from hf_kvret.benchmark.measure import Bench, Measure, Turn
from hf_kvret.benchmark.opponents import PreallocatedCache
from hf_kvret.benchmark.rows import TimedSample, timed_row
from hf_kvret.benchmark.tables import plot_seconds, timing_table
from hf_kvret.benchmark.timing import StepClock
from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.results import Cell, Results


@dataclass(frozen=True)
class DecodeSample(TimedSample):
    """One round of steps.

    Attributes:
        selected: what a timed step selected.
        flushed_tokens: tokens that left the window while time was taken, summed over layers.
    """

    selected: Selections
    flushed_tokens: int


class Decode(Measure):
    """Time of a decode step behind a context of given length.

    Each round fills every cache anew, takes --warmup steps and times --steps steps; the caches take
    turns, --rounds times. A row is the median over all timed steps, with quartiles.

        hf-kvret bench decode --shape llama-3.1-8b --context 32K,128K --batch 1,8 \\
            --dtype bfloat16 --caches full,dense,dense-graph,flat,paris --json decode.json
    """

    name: ClassVar[str] = "decode"
    summary: ClassVar[str] = "time of a decode step"

    @torch.inference_mode()
    def once(self, turn: Turn) -> DecodeSample:
        """Fill, warm up, time; CheckFailed when a retrieval cache retrieved nothing."""
        bench, model = turn.bench, turn.subject.model
        capacity = turn.context + bench.warmup + bench.steps + 1
        cache = turn.choice.make(model.config, capacity)
        with serving(model, cache):
            token, length = turn.filled(cache), turn.context
            before = selections(cache)
            if turn.choice.name == "dense-graph":
                assert isinstance(cache, PreallocatedCache)
                seconds = self._replayed(turn, cache, token)
                length += 1
            else:
                for _ in range(bench.warmup):
                    token = feed(model, cache, token, length).argmax(-1)
                    length += 1
                before = selections(cache)
                clock = StepClock(model.device)
                clock.mark()
                for _ in range(bench.steps):
                    token = feed(model, cache, token, length).argmax(-1)
                    length += 1
                    clock.mark()
                seconds = clock.seconds()
        chosen, flushed = Selections(), 0
        if isinstance(cache, RetrievalCache):
            after = selections(cache)
            if after.rows == before.rows:
                raise CheckFailed(
                    f"{turn.choice.name}: {bench.steps} steps behind {turn.context} tokens "
                    "retrieved nothing; nothing was reported"
                )
            chosen, flushed = after.since(before, bench.steps), int(after.cold - before.cold)
        usage = turn.usage(cache, length)
        floor = decode_floor(
            turn.subject.weights, cache, usage, turn.batch, chosen, turn.choice.on_host
        )
        return DecodeSample(seconds, floor, usage, chosen, flushed)

    def _replayed(self, turn: Turn, cache: PreallocatedCache, token: torch.Tensor) -> list[float]:
        """Seconds of steps that are replayed from a CUDA graph; the cache ends a token longer."""
        graph = GraphStep(turn.subject.model, cache, turn.context, token)
        for _ in range(turn.bench.warmup):
            token = graph.replay(token)
        clock = StepClock(token.device)
        clock.mark()
        for _ in range(turn.bench.steps):
            token = graph.replay(token)
            clock.mark()
        cache.rewind(turn.context + 1)
        return clock.seconds()

    def row(
        self, bench: Bench, cell: Cell, samples: Mapping[int, Sequence[DecodeSample]]
    ) -> dict[str, Any]:
        """Median and quartiles of a step, tokens a second, bytes held and read, the floor."""
        taken = samples[bench.subjects[0].layers]
        return timed_row(bench, cell["batch"], samples) | {
            "selected_rows": taken[-1].selected.rows,
            "bus_rows": taken[-1].selected.bus_rows,
            "flushed_tokens": sum(sample.flushed_tokens for sample in taken),
        }

    def table(self, results: Results) -> str:
        return timing_table(results, "ms a step")

    def plot(self, path: Path, results: Results) -> None:
        plot_seconds(path, results, "time of a decode step")
