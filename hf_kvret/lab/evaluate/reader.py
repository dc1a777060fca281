"""A cache at work: read a context, branch off, go on by tokens, say what it took and recalled."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.chunks import fit_chunk, recurs
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret.lab.evaluate.usage import Usage, held_blocks, usage_of
from hf_kvret.lossless.steps import LosslessSteps
from hf_kvret.models.exact_chunks import Span, why_whole
from hf_kvret.models.versions import as_argument

# These layers replace their tensors and never write into them, so that copies may share.
_SHAREABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
_SHARES = ("overlap", "mass", "best_mass")
# The divergence takes logits of so many tokens at a time: fp64 of a large vocabulary takes room.
_CHUNK = 16
# In one pass a layer that slides takes the square of the prompt, in time and for its mask.
_SLIDING_CHUNK = 1024

LayerRecall = dict[str, Any]
"""``layer``, and ``overlap``, ``mass`` and ``best_mass`` as in ``observe.recall.Recall``."""


class UsageSum:
    """What several readers took.

    Attributes:
        usage: rows summed; bytes of the last reader.
        seconds: of forward passes.
    """

    def __init__(self) -> None:
        self.usage, self.seconds = Usage(0, 0, 0, 0, 0, 0), 0.0

    def add(self, reader: Reader) -> None:
        """Count what ``reader`` took since it was made or forked."""
        self.count(reader.usage(), reader.seconds)

    def count(self, usage: Usage, seconds: float) -> None:
        """Count rows and seconds; the bytes of ``usage`` are the last ones now."""
        self.usage = replace(
            usage,
            rows_read=self.usage.rows_read + usage.rows_read,
            rows_cold=self.usage.rows_cold + usage.rows_cold,
        )
        self.seconds += seconds

    def row(self, seconds: str = "seconds") -> dict[str, Any]:
        """The numbers as a part of a row; ``seconds`` is the name of the time."""
        return {"read_ratio": self.usage.read_ratio, **self.usage.sizes, seconds: self.seconds}


class Reader:
    """One cache and its place in the text. Batch 1, greedy; runs in inference mode.

    Args:
        model: switched to our attention by ``hf_kvret.attach``.
        choice: the cache.
        capacity: the most tokens that will be fed in all.

    Raises:
        ValueError: ``capacity`` goes beyond the positions that the model knows.

    Attributes:
        cache: the transformers cache.
        length: tokens fed so far. The next token has this position also where a press has
            dropped some of them.
        seconds: of all forward passes since the reader was made or forked.
    """

    def __init__(self, model: PreTrainedModel, choice: CacheChoice, capacity: int) -> None:
        check_positions(model, capacity)
        self.model, self.choice, self.capacity = model, choice, capacity
        self.cache: Cache
        if not choice.needs_prompt:
            self.cache = choice.make(model.config, capacity)
            if isinstance(self.cache, RetrievalCache):
                self.cache.check_model(model)
        self.length = 0
        self.seconds = 0.0
        self._fed: tuple[torch.Tensor, ...] = ()
        self._call: Callable[..., Any] = model

    def prefill(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read a context ``[n]`` into the empty cache: as ``feed``; presses compress at its end."""
        if self.choice.needs_prompt:
            with self.choice.open(self.model, self.capacity) as self.cache:
                return self.feed(tokens)
        chunks = tokens.split(self._chunk(len(tokens)))
        if len(chunks) > 1 and isinstance(self.cache, RetrievalCache):
            self.cache.expect(len(tokens), len(chunks[0]), self.capacity - len(tokens))
        logits = [self.feed(chunk) for chunk in chunks][-1]
        if isinstance(self.cache, RetrievalCache):
            # One pass would have counted no reads, and would have left one snapshot.
            self.cache.snapshots.trim(1)
            for layer in self.cache.retrieval_layers:
                layer.exact_rows = 0
        return logits

    def _chunk(self, length: int) -> int:
        """Tokens of a pass over a context of ``length``: fewer where layers slide, if exact."""
        config, most, is_exact = self.model.config, 1, type(self.cache) is DynamicCache
        if isinstance(self.cache, RetrievalCache):
            options, most = self.cache.options, self.cache.options.max_draft
            # Later chunks read what is kept of earlier ones, be it codes or not all of them.
            is_exact = not (options.row_bits < 16 or options.evicts_by or options.prompt_recipe)
        if is_exact and any(self.cache.is_sliding) and not recurs(self.cache):
            size = fit_chunk(length, _SLIDING_CHUNK, most)
            if size is not None and why_whole(config, Span(0, size, length)) is None:
                return size
        return max(1, length)

    def feed(self, tokens: torch.Tensor, keep: int = 1) -> torch.Tensor:
        """Logits ``[keep, vocab]`` after the last ``keep`` of ``tokens [n]``, which are now held.

        Raises:
            ValueError: no tokens, or more than ``capacity`` in all.
        """
        count = tokens.shape[0]
        if not count or self.length + count > self.capacity:
            raise ValueError(
                f"{count} tokens after {self.length} of at most {self.capacity}: feed at least "
                "one, and make the reader with the length of the whole text"
            )
        device = self.model.device
        self._fed = (*self._fed, tokens)
        if self.answers_alone:
            self.length += count
            return torch.empty(keep, 0)
        started = time.perf_counter()
        logits = feed(self._call, self.cache, tokens.to(device)[None], self.length, keep)[0]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.perf_counter() - started
        self.length += count
        return logits

    @property
    def answers_alone(self) -> bool:
        """Whether a function in the place of ``generate`` answers, which gives no logits."""
        return callable(self.cache) and not hasattr(self.cache, "update")

    def need_logits(self) -> None:
        """CheckFailed for a cache that gives none."""
        if self.answers_alone:
            raise CheckFailed(f"{self.choice.name} answers by itself, and logits are compared here")

    def check_step(self, step: int) -> None:
        """ValueError where ``step`` tokens at once don't measure what one at a time does.

        A retrieval cache is exact beyond ``max_draft``; one that learns from queries takes a pass
        of several tokens for a question, and knows the next ones better than when generating.
        """
        options = self.choice.options
        if step == 1 or options is None:
            return
        if options.learns_from_queries:
            raise ValueError(
                f"--step {step}: {self.choice.name} learns from queries, and tokens that come "
                "together are a question to it, which generate's are not: use --step 1"
            )
        most = options.max_draft
        if step > most:
            raise ValueError(
                f"--step {step}: beyond max_draft ({most}) tokens {self.choice.name} attends to "
                f"everything; use --step {most}, or the cache with :max_draft={step}"
            )

    def fork(self, **changes: Any) -> Reader:
        """A reader at the same place that goes its own way; time and counts start at 0.

        ``changes`` are options for a retrieval cache, as ``track_recall=True``; TypeError for
        another cache.
        """
        twin = copy.copy(self)
        twin.seconds = 0.0
        if isinstance(self.cache, RetrievalCache):
            twin.cache = self.cache.fork(**changes)
            return twin
        if changes:
            raise TypeError(f"{self.choice.name} is no retrieval cache: it has no {list(changes)}")
        if not self.choice.is_exact:
            return self._fork_others(twin)
        twin.cache = copy.copy(self.cache)
        twin.cache.layers = [
            copy.copy(layer) if type(layer) in _SHAREABLE_LAYERS else copy.deepcopy(layer)
            for layer in self.cache.layers
        ]
        return twin

    def _fork_others(self, twin: Reader) -> Reader:
        """``twin`` with a deep copy; where there can be none, a reader that reads all again."""
        if self.answers_alone:
            return twin
        # Classes of others raise what they like; quanto's tensors can't be copied with torch 2.13.
        with suppress(Exception):
            # The model may be in it, and stays one.
            twin.cache = copy.deepcopy(self.cache, {id(self.model): self.model})
            own, copied = (held_blocks(one.cache, self.model) for one in (self, twin))
            shared = sum(own[address].nbytes for address in own.keys() & copied.keys())
            # A deep copy shares functions and modules, so also rows and tables that these hold.
            if 16 * shared < sum(block.nbytes for block in own.values()):
                return twin
        twin = Reader(self.model, self.choice, self.capacity)
        first, *others = self._fed
        twin.prefill(first)
        for tokens in others:
            twin.feed(tokens)
        twin.seconds = 0.0
        return twin

    def branch(self) -> Reader:
        """A fork whose cache tracks recall where it retrieves."""
        return self.fork(**{"track_recall": True} if isinstance(self.cache, RetrievalCache) else {})

    def recalls(self) -> list[LayerRecall]:
        """Recall of each layer that selected since the reader was branched off; else nothing."""
        if not isinstance(self.cache, RetrievalCache):
            return []
        return [
            {"layer": stats["layer"], **{name: stats[f"recall_{name}"] for name in _SHARES}}
            for stats in self.cache.stats()["layers"]
            if "recall_overlap" in stats
        ]

    def answer(
        self,
        logits: torch.Tensor,
        count: int,
        stop: Collection[int] = (),
        *,
        done: Callable[[list[int]], bool] = lambda answer: False,
    ) -> list[int]:
        """Up to ``count`` greedy tokens, the first one from ``logits [n, vocab]``' last row.

        Ends before one of ``stop``. Each token but the last is fed, one a pass, as ``generate``
        does; in rounds where answers are exact. ``done`` is asked after each token, whether all
        those given will do.
        """
        if self.answers_alone:
            return self._generated(count, stop)
        answer: list[int] = []
        with self.rounds():
            while len(answer) < count:
                best = int(logits[-1].argmax())
                if best in stop:
                    break
                answer.append(best)
                if len(answer) == count or done(answer):
                    break
                logits = self.feed(torch.tensor([best]))
        return answer

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """A context for steps of one token: they are exact where the cache is lossless."""
        cache = self.cache
        if isinstance(cache, RetrievalCache) and cache.options.lossless:
            with LosslessSteps(self.model, cache) as self._call:
                yield
            self._call = self.model
        else:
            yield

    def _generated(self, count: int, stop: Collection[int]) -> list[int]:
        """As ``answer``, of a function that is called as ``generate`` is."""
        generate: Any = self.cache
        tokens = torch.cat(self._fed)[None].to(self.model.device)
        started = time.perf_counter()
        result = generate(tokens, max_new_tokens=count, do_sample=False)
        self.seconds += time.perf_counter() - started
        answer = getattr(result, "sequences", result)[0, tokens.shape[1] :].tolist()[:count]
        self._fed = (*self._fed, torch.tensor(answer[:-1], dtype=torch.long))
        self.length += len(answer[:-1])
        end = next((index for index, token in enumerate(answer) if token in stop), len(answer))
        return answer[:end]

    def usage(self) -> Usage:
        """Bytes held and rows read so far; rows since the reader was made or forked."""
        return usage_of(self.cache, self.model, self.length, on_host=self.choice.on_host)


@torch.inference_mode()
def feed(
    model: Callable[..., Any], cache: Cache, tokens: torch.Tensor, start: int, keep: int = 1
) -> torch.Tensor:
    """Logits ``[B, keep, V]`` after ``tokens [B, n]``, which the cache holds afterwards.

    The first of them is at position ``start``.
    """
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
    return model(
        input_ids=tokens,
        **as_argument(cache),
        position_ids=positions[None],
        # kvpress reads it; transformers takes it as a spare keyword.
        cache_position=positions,
        use_cache=True,
        logits_to_keep=keep,
    ).logits


def begin(
    model: PreTrainedModel,
    choice: CacheChoice,
    context: torch.Tensor,
    question: torch.Tensor,
    answer_len: int,
    *,
    whole: bool,
) -> tuple[Reader, torch.Tensor]:
    """A reader with room for the answer, and the logits ``[1, vocab]`` that the answer begins with.

    Passes are those of ``generate``: ``context [n]`` and ``question [m]`` in one with ``whole``,
    else the context in a first call and the question in a second one.
    """
    reader = Reader(model, choice, len(context) + len(question) + answer_len)
    if whole:
        return reader, reader.prefill(torch.cat([context, question]))
    reader.prefill(context)
    return reader, reader.feed(question)


def check_positions(model: PreTrainedModel, count: int) -> None:
    """ValueError when ``count`` tokens go beyond the positions that the model knows."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and count > most:
        raise ValueError(
            f"{count} tokens, but the model knows {most} positions (max_position_embeddings): take "
            "shorter lengths, or extend its config"
        )


def mean_recall(recalls: Sequence[LayerRecall]) -> dict[str, float | None]:
    """``overlap``, ``mass`` and ``best_mass``, means over ``recalls``; None each for none."""
    return {
        name: sum(one[name] for one in recalls) / len(recalls) if recalls else None
        for name in _SHARES
    }


def mean_by_layer(samples: Iterable[Sequence[LayerRecall]]) -> list[LayerRecall]:
    """The recall of each layer, mean over the samples that have it."""
    by_layer: dict[int, list[LayerRecall]] = {}
    for one in (recall for sample in samples for recall in sample):
        by_layer.setdefault(one["layer"], []).append(one)
    return [{"layer": layer, **mean_recall(some)} for layer, some in sorted(by_layer.items())]


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``[n]`` fp64 KL(full || other) in nats of logits ``[n, vocab]``, never below 0."""
    results = []
    for chunks in zip(full.split(_CHUNK), other.split(_CHUNK), strict=True):
        p, q = (logits.double().log_softmax(-1) for logits in chunks)
        results.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
    return torch.cat(results)
