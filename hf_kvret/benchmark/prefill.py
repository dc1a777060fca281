"""``hf-kvret bench prefill``: time to the first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.benchmark.filling import feed, prefill, random_tokens, serving
from hf_kvret.benchmark.floors import prefill_floor
from hf_kvret.benchmark.measure import Bench, Measure, Turn
from hf_kvret.benchmark.rows import TimedSample, timed_row
from hf_kvret.benchmark.tables import plot_seconds, timing_table
from hf_kvret.benchmark.timing import StepClock
from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.arguments import length
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.results import Cell, Results
from hf_kvret.prefill import fit_chunk, prompt_chunk


def chunk_length(text: str) -> int | Literal["own"] | None:
    """What ``--chunk`` means, for argparse: a length as 8K, ``own``, or ``none``."""
    if text == "own":
        return "own"
    if text == "none":
        return None
    return length(text)


@dataclass(frozen=True)
class PromptSample(TimedSample):
    """What a turn brings home.

    Attributes:
        chunk: tokens of a pass; None: the whole prompt.
    """

    chunk: int | None


class Prefill(Measure):
    """Time to the first token (TTFT): a prompt of given length goes into an empty cache.

    Args:
        chunk: tokens of a pass, None for one pass, ``"own"`` for what each cache says.
    """

    name: ClassVar[str] = "prefill"
    summary: ClassVar[str] = "time to the first token"
    description: ClassVar[str] = (
        "Time to the first token (TTFT): a prompt of given length goes into an empty cache. "
        "Buffers are made while it is read, and count. A retrieval cache reads it as its "
        "prefill_chunk says, in one pass or in chunks, the others in one pass; --chunk sets "
        "another length for all but kvpress. Each round reads --warmup prompts and times "
        "--steps more; the caches take turns, --rounds times. A row is the median."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench prefill --shape llama-3.1-8b --layers 8 --context 8K,32K --dtype bfloat16",
    )

    def __init__(self, chunk: int | Literal["own"] | None = "own") -> None:
        self.chunk = chunk

    @torch.inference_mode()
    def once(self, turn: Turn) -> PromptSample:
        """Read the prompt again and again, each time into a new cache."""
        bench, model = turn.bench, turn.subject.model
        tokens = random_tokens(model, turn.batch, turn.context, bench.seed)
        seconds, chunk = [], self._chunk(turn)
        for run in range(bench.warmup + bench.steps):
            cache = turn.choice.make(model.config, turn.context)
            with serving(model, cache):
                clock = StepClock(model.device)
                clock.mark()
                _read(model, turn.choice, cache, tokens, chunk)[:, -1].argmax(-1)
                clock.mark()
                taken = clock.seconds()
            usage = turn.usage(cache, turn.context)
            if run >= bench.warmup:
                seconds += taken
            # Two caches at once would need twice the memory.
            del cache
        floor = prefill_floor(turn.subject.weights, usage, turn.batch, turn.context)
        return PromptSample(seconds, floor, usage, chunk)

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

    def row(
        self, bench: Bench, cell: Cell, samples: Mapping[int, Sequence[PromptSample]]
    ) -> dict[str, Any]:
        """Median and quartiles of the time to the first token, tokens a second, and ``chunk``."""
        taken = samples[bench.subjects[0].layers]
        row = timed_row(bench, cell["batch"] * cell["context"], samples)
        return row | {"chunk": taken[-1].chunk}

    def table(self, results: Results) -> str:
        table = timing_table(results, "ms to the first token")
        chunked = [
            f"{cell['cache']} at {cell['context']:,} x {cell['batch']}: {row['chunk']:,}"
            for cell, row in results
            if row.get("chunk")
        ]
        if not chunked:
            return table
        return f"{table}\n\nTokens of a pass, where it was not all: {'; '.join(chunked)}."

    def plot(self, path: Path, results: Results) -> None:
        plot_seconds(path, results, "time to the first token")


def _read(
    model: PreTrainedModel,
    choice: CacheChoice,
    cache: Cache,
    tokens: torch.Tensor,
    chunk: int | None,
) -> torch.Tensor:
    """``prefill`` in passes of ``chunk`` tokens, announced as ``generate`` does; last logits."""
    length = tokens.shape[1]
    if isinstance(cache, RetrievalCache):
        cache.expect(length, chunk or length)
    if chunk is None:
        return prefill(model, choice, cache, tokens)
    start = 0
    for part in tokens.split(chunk, dim=1):
        logits = feed(model, cache, part, start)
        start += part.shape[1]
    return logits
