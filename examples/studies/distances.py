"""How far the logits of a cache are from full attention's on its way through a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from ablation import Ablation, caches_option, made, not_here
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.lab.evaluate.subject import Subject
from hf_kvret.lab.evaluate.teacher_forcing import Memo, full_logits
from hf_kvret.lab.program.common_options import count_option
from hf_kvret.lab.report.results import Cell
from hf_kvret.options.config import RetrievalConfig

NOTHING_COLD = "nothing was cold: take a longer --context, or flat:dense_below=0:recent=64"
Logits = tuple[torch.Tensor, torch.Tensor]
"""Log-probabilities ``[n, vocab]`` of a cache and of full attention, after the same tokens."""
_expected = Memo(most=8)


@dataclass(frozen=True, kw_only=True)
class DistanceStudy(Ablation):
    """A study of logits, whose contexts are read once for all variants of a cache."""

    method: ClassVar[str] = "flat"
    example: ClassVar[str] = "recent=128"
    described: ClassVar[tuple[str, ...]] = ("windows", "new_tokens", "step")

    caches: str | None = caches_option("flat")
    windows: int = count_option(2, "at most this many contexts of each length")
    parts: tuple[str, ...] = not_here(("tokens",))

    @cached_property
    def _readers(self) -> dict[tuple[Any, ...], list[Reader]]:
        """By cache, length and budget; those of the last cache and length."""
        return {}

    def read(
        self,
        subject: Subject,
        cell: Cell,
        cache: RetrievalCache,
        options: RetrievalConfig,
        windows: Sequence[torch.Tensor],
    ) -> list[Reader]:
        """A reader of the first ``cell["length"]`` tokens of each of ``windows [n]``."""
        key = cell["cache"], cell["length"], options.top_k
        if key not in self._readers:
            for known in [known for known in self._readers if known[:2] != key[:2]]:
                del self._readers[known]
            choice = made(cell["cache"], type(cache), options)
            self._readers[key] = read_contexts(subject, choice, windows, cell["length"])
        return self._readers[key]


def read_contexts(
    subject: Subject, choice: CacheChoice, windows: Sequence[torch.Tensor], length: int
) -> list[Reader]:
    """For each of the windows ``[n]`` a reader of its first ``length`` tokens, in one pass."""
    readers = []
    for window in windows:
        readers.append(Reader(subject.model, choice, len(window)))
        readers[-1].prefill(window[:length])
    return readers


def cache_of(subject: Subject, choice: CacheChoice) -> tuple[RetrievalCache, RetrievalConfig]:
    """The cache of ``choice``, and its options; it retrieves at once where it names no bound."""
    cache = choice.make(subject.model.config, 1)
    assert isinstance(cache, RetrievalCache)
    named = "dense_below" in choice.name
    return cache, cache.options if named else cache.options.replace(dense_below=0)


def follow(
    start: Reader,
    window: torch.Tensor,
    step: int,
    watch: Callable[[RetrievalCache], None] = lambda cache: None,
    **changes: Any,
) -> tuple[Reader, Logits]:
    """Go on from a context to the end of its window; the reader there, and what it gave.

    Args:
        start: of ``read_contexts``; it stays where it is.
        window: ``[n]`` int64.
        step: tokens of a pass.
        watch: gets the cache before it goes on.
        changes: options of the cache from there on.
    """
    start.check_step(step)
    reader = start.fork(**changes)
    assert isinstance(reader.cache, RetrievalCache)
    watch(reader.cache)
    chunks = window[start.length :].split(step)
    bar = tqdm(chunks, leave=False, desc=reader.choice.name, mininterval=1)
    logits = torch.cat([reader.feed(chunk, keep=len(chunk)) for chunk in bar])
    expected = full_attention(reader.model, window, start.length)
    return reader, (logits.float().log_softmax(-1), expected)


def distance(places: Sequence[Logits]) -> dict[str, float]:
    """Means over all places of ``follow``, as plain JSON values.

    ``kl`` is the divergence of the next token's distribution from full attention's, in nats;
    ``kl_error`` its standard error, as if places were independent; ``equal`` the share of places
    with the same best token.
    """
    kl = torch.cat([(want.exp() * (want - logits)).sum(-1) for logits, want in places]).double()
    equal = torch.cat([logits.argmax(-1) == want.argmax(-1) for logits, want in places]).double()
    return {
        "kl": float(kl.mean()),
        "kl_error": float(kl.std()) / math.sqrt(len(kl)),
        "equal": float(equal.mean()),
    }


def full_attention(model: PreTrainedModel, window: torch.Tensor, length: int) -> torch.Tensor:
    """Log-probabilities ``[n, vocab]`` of full attention after ``window[length:]``."""

    def make() -> torch.Tensor:
        return full_logits(model, window, length).log_softmax(-1)

    return _expected.get(model, (tuple(window.tolist()), length), make)
