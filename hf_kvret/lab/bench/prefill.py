"""``hf-kvret bench prefill``: time to the first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.attention.prompt_chunks import fit_chunk, prompt_chunk
from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.filling import Turn, feed, random_tokens, serving
from hf_kvret.lab.bench.floors import prefill_floor
from hf_kvret.lab.bench.model_measurement import ModelMeasurement, TimedSample, timed_row
from hf_kvret.lab.bench.tables import plot_contexts, timing_table
from hf_kvret.lab.bench.timing import StepClock
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.program.arguments import length
from hf_kvret.lab.program.options import option, with_default
from hf_kvret.lab.report.results import Cell, Results

Chunk = int | Literal["own"] | None


def _chunk_length(text: str) -> Chunk:
    """What ``--chunk`` means, for argparse: a length as 8K, ``own``, or ``none``."""
    if text == "own":
        return "own"
    return None if text == "none" else length(text)


@dataclass(frozen=True, kw_only=True)
class Prefill(ModelMeasurement):
    """Time to the first token (TTFT): a prompt of given length goes into an empty cache.

    Buffers are made while it is read, and count. A retrieval cache reads it as its prefill_chunk
    says, in one pass or in chunks, the others in one pass; --chunk sets another length for all but
    kvpress. Each round reads --warmup prompts and times --steps more; the caches take turns,
    --rounds times. A row is the median.
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
    chunk: Chunk = option(
        "own",
        "tokens of a pass, as 8K; none: one pass; own: as each cache's prefill_chunk",
        kind=_chunk_length,
    )

    def setup(self) -> dict[str, Any]:
        return super().setup() | {"chunk": self.chunk}

    @torch.inference_mode()
    def once(self, turn: Turn) -> TimedSample:
        """Read the prompt again and again, each time into a new cache."""
        model, chunk = turn.subject.model, self._chunk(turn)
        tokens = random_tokens(model, turn.batch, turn.context, self.seed)
        seconds = []
        for run in range(self.warmup + self.steps):
            cache = turn.choice.make(model.config, turn.context)
            with serving(model, cache):
                clock = StepClock(model.device)
                clock.mark()
                _read(model, turn.choice, cache, tokens, chunk)[:, -1].argmax(-1)
                clock.mark()
                taken = clock.seconds()
            usage = turn.usage(cache, turn.context)
            if run >= self.warmup:
                seconds += taken
            # Two caches at once would need twice the memory.
            del cache
        floor = prefill_floor(turn.subject.weights, usage, turn.batch, turn.context)
        return TimedSample(seconds, floor, usage, {"chunk": chunk})

    def _chunk(self, turn: Turn) -> int | None:
        """Tokens of a pass in this turn; None: all of them."""
        choice, chunk = turn.choice, self.chunk
        if choice.method == "kvpress":
            return None
        if choice.options is not None:
            own = choice.options
            asked = own if chunk == "own" else own.replace(prefill_chunk=chunk)
            return prompt_chunk(asked, turn.subject.model, turn.batch, turn.context)
        return fit_chunk(turn.context, chunk, 0) if isinstance(chunk, int) else None

    def row(self, cell: Cell, samples: Mapping[int, Sequence[TimedSample]]) -> Row:
        """Median and quartiles of the time to the first token, tokens a second, and ``chunk``."""
        return timed_row(self, cell["batch"] * cell["context"], samples)

    @classmethod
    def table(cls, results: Results) -> str:
        table = timing_table(results, "ms to the first token")
        chunked = [
            f"{cell['cache']} at {cell['context']:,} x {cell['batch']}: {row['chunk']:,}"
            for cell, row in results
            if row.get("chunk")
        ]
        if not chunked:
            return table
        return f"{table}\n\nTokens of a pass, where it was not all: {'; '.join(chunked)}."

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        plot_contexts(path, results, "time to the first token", "ms", "seconds")


def _read(
    model: PreTrainedModel,
    choice: CacheChoice,
    cache: Cache,
    tokens: torch.Tensor,
    chunk: int | None,
) -> torch.Tensor:
    """Logits after ``tokens`` in passes of ``chunk``, which are announced as ``generate`` does."""
    length = tokens.shape[1]
    if isinstance(cache, RetrievalCache):
        cache.expect(length, chunk or length)
    start = 0
    with choice.around_prefill(model):
        for part in tokens.split(chunk or length, dim=1):
            logits = feed(model, cache, part, start)
            start += part.shape[1]
    return logits
