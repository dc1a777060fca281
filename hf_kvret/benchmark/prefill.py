"""``hf-kvret bench prefill``: time to the first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.benchmark.filling import prefill, random_tokens, serving
from hf_kvret.benchmark.floors import prefill_floor
from hf_kvret.benchmark.measure import Bench, Measure, Turn
from hf_kvret.benchmark.rows import TimedSample, timed_row
from hf_kvret.benchmark.tables import plot_seconds, timing_table
from hf_kvret.benchmark.timing import StepClock
from hf_kvret.evaluation.results import Cell, Results


class Prefill(Measure):
    """Time to the first token (TTFT): a prompt of given length goes into an empty cache.

    The prompt is read in one pass; buffers are made while it is read, and count. Each round reads
    --warmup prompts and times --steps more; the caches take turns, --rounds times. A row is the
    median.

        hf-kvret bench prefill --shape llama-3.1-8b --layers 8 --context 8K,32K --dtype bfloat16
    """

    name: ClassVar[str] = "prefill"
    summary: ClassVar[str] = "time to the first token"

    @torch.inference_mode()
    def once(self, turn: Turn) -> TimedSample:
        """Read the prompt again and again, each time into a new cache."""
        bench, model = turn.bench, turn.subject.model
        tokens = random_tokens(model, turn.batch, turn.context, bench.seed)
        seconds = []
        for run in range(bench.warmup + bench.steps):
            cache = turn.choice.make(model.config, turn.context)
            with serving(model, cache):
                clock = StepClock(model.device)
                clock.mark()
                prefill(model, turn.choice, cache, tokens)[:, -1].argmax(-1)
                clock.mark()
                taken = clock.seconds()
            usage = turn.usage(cache, turn.context)
            if run >= bench.warmup:
                seconds += taken
            # Two caches at once would need twice the memory.
            del cache
        floor = prefill_floor(turn.subject.weights, usage, turn.batch, turn.context)
        return TimedSample(seconds, floor, usage)

    def row(
        self, bench: Bench, cell: Cell, samples: Mapping[int, Sequence[TimedSample]]
    ) -> dict[str, Any]:
        """Median and quartiles of the time to the first token, prompt tokens a second."""
        return timed_row(bench, cell["batch"] * cell["context"], samples)

    def table(self, results: Results) -> str:
        return timing_table(results, "ms to the first token")

    def plot(self, path: Path, results: Results) -> None:
        plot_seconds(path, results, "time to the first token")
