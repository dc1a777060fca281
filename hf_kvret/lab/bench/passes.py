"""``hf-kvret bench decode``, ``prefill`` and ``turns``: time of a step, and to the first token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.chunks import prompt_chunk
from hf_kvret.lab.bench import timing
from hf_kvret.lab.bench.filling import Turn, random_tokens, serving
from hf_kvret.lab.bench.model_measurement import ModelMeasurement, TimedSample
from hf_kvret.lab.bench.opponents import CAPTURED
from hf_kvret.lab.bench.stepping import LosslessRounds, Steps, make_steps
from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.evaluate.reader import feed
from hf_kvret.lab.program.options import with_default
from hf_kvret.lab.report.results import Cell

# Tokens of a message, of an answer, and those of an answer that are thought.
_MESSAGE, _ANSWER, _THOUGHT = 64, 32, 24


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
    unit: ClassVar[str] = "ms a step"
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
            before = timing.selections(cache)
            count = self.steps_within(warm_seconds[-1] if warm_seconds else 0.0)
            _, seconds, kinds = steps.run(token, count)
            steps.finish()
        chosen = timing.Selections()
        if isinstance(cache, RetrievalCache):
            after = timing.selections(cache)
            if after.rows == before.rows and cache.options.retrieves:
                raise CheckFailed(
                    f"{turn.choice.name}: {len(seconds)} steps behind {turn.context} tokens "
                    "retrieved nothing; nothing was reported"
                )
            drafts = steps.drafts if isinstance(steps, LosslessRounds) else 1
            chosen = after.since(before, max(1, drafts * len(seconds)))
        usage = turn.usage(cache, steps.length)
        floor = timing.decode_floor(
            turn.subject.weights, cache, usage, turn.batch, chosen, turn.choice.on_host
        )
        if isinstance(steps, LosslessRounds):
            sizes = turn.subject.weights, usage, turn.choice.on_host
            floor = timing.round_floor(floor, steps.drafts, *sizes)
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


@dataclass(frozen=True, kw_only=True)
class Prefill(ModelMeasurement):
    """Time to the first token (TTFT): a prompt of given length goes into an empty cache.

    Buffers are made while it is read, and count. A retrieval cache reads it as its prefill_chunk
    says, in one pass or in chunks, the others in one pass. Each round reads --warmup prompts and
    times --steps more; the caches take turns, --rounds times. A row is the median.
    """

    name: ClassVar[str] = "prefill"
    summary: ClassVar[str] = "time to the first token"
    unit: ClassVar[str] = "ms to the first token"
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
                clock = timing.StepClock(model.device)
                clock.mark()
                _read(model, cache, tokens, chunk)[:, -1].argmax(-1)
                clock.mark()
                interval = clock.seconds()
            usage = turn.usage(cache, turn.context)
            if run >= self.warmup:
                seconds += interval
            # Two caches at once would need twice the memory.
            del cache
        floor = timing.prefill_floor(turn.subject.weights, usage, turn.batch, turn.context)
        return TimedSample(seconds, floor, usage, {"chunk": chunk})

    def tokens(self, cell: Cell) -> int:
        return cell["batch"] * cell["context"]


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
    unit: ClassVar[str] = "ms to the first token"
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
        floor = timing.prefill_floor(turn.subject.weights, usage, turn.batch, tokens[-1])
        more = {"tokens_read": tokens[-self.steps :]}
        return TimedSample(seconds[-self.steps :], floor, usage, more)

    def tokens(self, cell: Cell) -> int:
        return cell["batch"] * cell["context"]


def _answer(model: Any, prompt: torch.Tensor, cache: Any) -> tuple[torch.Tensor, float, int]:
    """``prompt`` and an answer, seconds to its first token, and tokens that were read until then.

    ``cache`` holds them afterwards.
    """
    clock, lengths = timing.StepClock(model.device), []

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
