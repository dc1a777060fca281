"""``hf-kvret bench turns``: what a turn of a chat reads, and how soon its first token comes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.filling import Turn, random_tokens, serving
from hf_kvret.lab.bench.model_measurement import ModelMeasurement, TimedSample
from hf_kvret.lab.bench.tables import plot_contexts, timing_table
from hf_kvret.lab.bench.timing import StepClock, prefill_floor
from hf_kvret.lab.program.options import with_default
from hf_kvret.lab.report.results import Cell, Results

# Tokens of a message, of an answer, and those of an answer that are thought.
_MESSAGE, _ANSWER, _THOUGHT = 64, 32, 24


@dataclass(frozen=True, kw_only=True)
class Turns(ModelMeasurement):
    """Time to the first token of a turn, whose prompt is the conversation so far.

    A message of --context tokens begins it. A turn adds a message of 64 tokens, and an answer of
    32. As chat templates do, its prompt leaves out what earlier answers thought, their first 24
    tokens. Retrieval caches go on with what they hold (on_divergence="crop"). Others begin anew in
    each turn, as transformers can't go on with another text. Each round takes --warmup turns behind
    the first message, and times --steps more.
    """

    name: ClassVar[str] = "turns"
    summary: ClassVar[str] = "what a turn of a chat reads, and the time to its first token"
    examples: ClassVar[tuple[str, ...]] = (
        "hf-kvret bench turns --shape hybrid-0.5b --context 8K --caches "
        "full,paris,paris:snapshots=0 --json turns.json",
    )

    caches: str = with_default(ModelMeasurement, "caches", "full,paris,paris:snapshots=0")
    steps: int = with_default(ModelMeasurement, "steps", 4)
    warmup: int = with_default(ModelMeasurement, "warmup", 0)

    @torch.inference_mode()
    def once(self, turn: Turn) -> TimedSample:
        """A conversation."""
        model, turns = turn.subject.model, 1 + self.warmup + self.steps
        prompt = random_tokens(model, turn.batch, turn.context, self.seed)
        seconds, tokens = [], []
        cache: Any = None
        for number in range(turns):
            capacity = turn.context + turns * (_MESSAGE + _ANSWER)
            goes_on = isinstance(cache, RetrievalCache)
            opened = nullcontext(cache) if goes_on else turn.choice.open(model, capacity)
            with opened as cache, serving(model, cache):
                if isinstance(cache, RetrievalCache) and not goes_on:
                    cache = cache.fork(on_divergence="crop")
                text, time_s, count = _answer(model, prompt, cache)
            seconds.append(time_s)
            tokens.append(count)
            message = random_tokens(model, turn.batch, _MESSAGE, self.seed + number + 1)
            end = prompt.shape[1]
            prompt = torch.cat([prompt, text[:, end + _THOUGHT :], message], dim=1)
        usage = turn.usage(cache, end)
        floor = prefill_floor(turn.subject.weights, usage, turn.batch, tokens[-1])
        more = {"tokens_read": tokens[-self.steps :]}
        return TimedSample(seconds[-self.steps :], floor, usage, more)

    def tokens(self, cell: Cell) -> int:
        return cell["batch"] * cell["context"]

    @classmethod
    def table(cls, results: Results) -> str:
        return timing_table(results, "ms to the first token")

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        plot_contexts(path, results, "time to the first token of a turn")


def _answer(model: Any, prompt: torch.Tensor, cache: Any) -> tuple[torch.Tensor, float, int]:
    """``prompt`` and an answer, seconds to its first token, and tokens that were read until then.

    ``cache`` holds them afterwards.
    """
    clock, lengths = StepClock(model.device), []

    def count(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        clock.mark()
        lengths.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_hook(count, with_kwargs=True)
    try:
        clock.mark()
        text = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=_ANSWER,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    finally:
        hook.remove()
    # Each later token has a pass of its own.
    passes = len(lengths) - (_ANSWER - 1)
    return text, sum(clock.seconds()[:passes]), sum(lengths[:passes])
