"""``hf-kvret bench decode`` and ``prefill``: time of a decode step, and to the first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.chunks import prompt_chunk
from hf_kvret.lab.bench.filling import Turn, feed, random_tokens, serving
from hf_kvret.lab.bench.model_measurement import ModelMeasurement, TimedSample
from hf_kvret.lab.bench.opponents import CAPTURED
from hf_kvret.lab.bench.stepping import LosslessRounds, Steps, make_steps
from hf_kvret.lab.bench.tables import plot_contexts, timing_table
from hf_kvret.lab.bench.timing import (
    Selections,
    StepClock,
    decode_floor,
    prefill_floor,
    round_floor,
    selections,
)
from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.program.options import with_default
from hf_kvret.lab.report.results import Cell, Results


@dataclass(frozen=True, kw_only=True)
class Decode(ModelMeasurement):
    """Time of a decode step behind a context of given length.

    Each round fills every cache anew, takes --warmup steps and times --steps steps; the caches take
    turns, --rounds times. A row is the median over all timed steps, with quartiles. Steps of
    retrieval caches are replayed from a CUDA graph where they can be; graph=false, as in
    paris:graph=false, measures them as they are without it. A cache with exact answers, as
    paris:lossless=true:max_draft=15, takes rounds of so many drafts that are all right, and its
    times are of a token.
    """

    name: ClassVar[str] = "decode"
    summary: ClassVar[str] = "time of a decode step"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench decode --shape llama-3.1-8b --context 32K,128K --batch 1,8 --dtype "
        "bfloat16 --caches full,dense,dense-graph,flat,paris --json decode.json",
    )

    @torch.inference_mode()
    def once(self, turn: Turn) -> TimedSample:
        """Fill, warm up, time; CheckFailed when a retrieval cache retrieved nothing."""
        with turn.filled(self.warmup + self.steps + 1) as (cache, token):
            steps = self.steps_of(turn, cache)
            token, warm_seconds, _ = steps.run(token, self.warmup)
            before = selections(cache)
            count = self.steps_within(warm_seconds[-1] if warm_seconds else 0.0)
            _, seconds, kinds = steps.run(token, count)
            steps.finish()
        chosen = Selections()
        if isinstance(cache, RetrievalCache):
            after = selections(cache)
            if after.rows == before.rows and cache.options.retrieves:
                raise CheckFailed(
                    f"{turn.choice.name}: {len(seconds)} steps behind {turn.context} tokens "
                    "retrieved nothing; nothing was reported"
                )
            drafts = steps.drafts if isinstance(steps, LosslessRounds) else 1
            chosen = after.since(before, max(1, drafts * len(seconds)))
        usage = turn.usage(cache, steps.length)
        floor = decode_floor(
            turn.subject.weights, cache, usage, turn.batch, chosen, turn.choice.on_host
        )
        if isinstance(steps, LosslessRounds):
            sizes = turn.subject.weights, usage, turn.choice.on_host
            floor = round_floor(floor, steps.drafts, *sizes)
        more = {
            "selected_rows": chosen.rows,
            "bus_rows": chosen.bus_rows,
            "steps": kinds,
            "not_replayed": steps.reason,
        }
        return TimedSample(seconds, floor, usage, more)

    def steps_of(self, turn: Turn, cache: Cache) -> Steps:
        """The steps to time: rounds where answers are exact."""
        model = turn.subject.model
        if isinstance(cache, RetrievalCache) and cache.options.lossless:
            return LosslessRounds(model, cache, turn.context)
        return make_steps(turn.choice, model, cache, turn.context)

    def tokens(self, cell: Cell) -> int:
        return cell["batch"]

    def row(self, cell: Cell, samples: Sequence[TimedSample]) -> Row:
        """As for every measurement; ``steps`` counts the timed steps by kind."""
        kinds = Counter(kind for sample in samples for kind in sample.more["steps"])
        return super().row(cell, samples) | {"steps": dict(kinds.most_common())}

    @classmethod
    def table(cls, results: Results) -> str:
        return timing_table(results, "ms a step")

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        plot_contexts(path, results, "time of a decode step")


@dataclass(frozen=True, kw_only=True)
class Prefill(ModelMeasurement):
    """Time to the first token (TTFT): a prompt of given length goes into an empty cache.

    Buffers are made while it is read, and count. A retrieval cache reads it as its prefill_chunk
    says, in one pass or in chunks, the others in one pass. Each round reads --warmup prompts and
    times --steps more; the caches take turns, --rounds times. A row is the median.
    """

    name: ClassVar[str] = "prefill"
    summary: ClassVar[str] = "time to the first token"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench prefill --shape llama-3.1-8b --layers 8 --context 8K,32K --dtype bfloat16",
    )

    caches: str = with_default(
        ModelMeasurement, "caches", "full,dense,flat,paris,lrqk,ctkvr,a2ats,aqua"
    )
    steps: int = with_default(ModelMeasurement, "steps", 1)
    warmup: int = with_default(ModelMeasurement, "warmup", 1)

    def check(self) -> None:
        super().check()
        for name in CAPTURED:
            if name in self.choices:
                raise ValueError(f"{name} is a way to decode, bench prefill has none: use dense")

    @torch.inference_mode()
    def once(self, turn: Turn) -> TimedSample:
        """Read the prompt again and again, each time into a new cache."""
        model, options, chunk = turn.subject.model, turn.choice.options, None
        if options is not None:
            chunk = prompt_chunk(options, model, turn.batch, turn.context)
        tokens = random_tokens(model, turn.batch, turn.context, self.seed)
        seconds = []
        for run in range(self.warmup + self.steps):
            opened = turn.choice.open(model, turn.context)
            with opened as cache, serving(model, cache):
                clock = StepClock(model.device)
                clock.mark()
                _read(model, cache, tokens, chunk)[:, -1].argmax(-1)
                clock.mark()
                interval = clock.seconds()
            usage = turn.usage(cache, turn.context)
            if run >= self.warmup:
                seconds += interval
            # Two caches at once would need twice the memory.
            del cache
        floor = prefill_floor(turn.subject.weights, usage, turn.batch, turn.context)
        return TimedSample(seconds, floor, usage, {"chunk": chunk})

    def tokens(self, cell: Cell) -> int:
        return cell["batch"] * cell["context"]

    @classmethod
    def table(cls, results: Results) -> str:
        return timing_table(results, "ms to the first token")

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        plot_contexts(path, results, "time to the first token")


def _read(
    model: PreTrainedModel, cache: Cache, tokens: torch.Tensor, chunk: int | None
) -> torch.Tensor:
    """Logits after ``tokens`` in passes of ``chunk``, which are announced as ``generate`` does."""
    length = tokens.shape[1]
    if isinstance(cache, RetrievalCache):
        cache.expect(length, chunk or length)
    start = 0
    for new in tokens.split(chunk or length, dim=1):
        logits = feed(model, cache, new, start)
        start += new.shape[1]
    return logits
