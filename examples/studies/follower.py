"""Following a text through one variant of a retrieval cache, and what was met on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from tqdm import tqdm

from hf_kvret.cache import RetrievalCache
from hf_kvret.core.index import ColdTokens
from hf_kvret.core.recall import exact_scores
from hf_kvret.core.state import Tensors
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.following import LayerRecall, full_choices, layer_recalls, mean_by_layer
from hf_kvret.evaluation.reader import Reader
from hf_kvret.evaluation.stretches import Pace, Walk, mean_of, mean_stretches, text_source, walk
from hf_kvret.evaluation.subject import Subject
from hf_kvret.methods.ctkvr import CTkvrCache, CTkvrConfig, CTkvrIndex
from hf_kvret_kernels.relevance import group_relevance

_MEANS = ("overlap", "mass", "best_mass", "equal")


@dataclass
class Follower:
    """What was met by one variant, over all its contexts.

    Attributes:
        subject: the model.
        choice: the variant.
        method: the name of its cache, for errors.
        samples: for each context the stretches that were measured, as ``Walk.stretches`` with
            ``equal``, the share of tokens that are full attention's.
        recalls: of each layer in each stretch.
    """

    subject: Subject
    choice: CacheChoice
    method: str
    samples: list[list[dict[str, Any]]] = field(default_factory=list)
    recalls: list[Sequence[LayerRecall]] = field(default_factory=list)
    _read: int = 0
    _cold: int = 0
    _candidates: int = 0
    _seconds: float = 0.0

    def follow(self, window: torch.Tensor, length: int, pace: Pace) -> None:
        """Read ``window[:length]``, then measure stretches of the tokens after it."""
        reader, stretches = self.reader(window, length), []
        expected = full_choices(self.subject.model, window, start=length)
        for start in range(0, pace.count, pace.every):
            end = min(start + pace.every, pace.count)
            tokens, right = window[length + start : length + end], expected[start:end]
            reader, found = self.measure(reader, tokens, right, pace.step)
            stretches.append(found | {"end": end})
        self.samples.append(stretches)

    def result(self) -> dict[str, Any]:
        """Means over contexts, and what was read, as plain JSON values.

        ``candidate_ratio`` and ``read_ratio`` are shares of the cold rows.

        Raises:
            ValueError: nothing was cold.
        """
        if not self._cold:
            raise ValueError(
                "nothing was cold: take a longer --context, or smaller regions as "
                f"{self.method}:dense_below=0:recent=64:flush=64"
            )
        stretches = mean_stretches(self.samples)
        return {
            **{name: mean_of(stretches, name) for name in _MEANS},
            "stretches": stretches,
            "candidate_ratio": self._candidates / self._cold,
            "read_ratio": self._read / self._cold,
            "seconds_with_recall": self._seconds,
        }

    def layers(self) -> list[dict[str, Any]]:
        """The recall of each layer, mean over contexts."""
        return [one.to_dict() for one in mean_by_layer(self.recalls)]

    def reader(self, window: torch.Tensor, length: int, more: int = 0) -> Reader:
        """A cache that has read ``window[:length]``, with room for ``more`` than the window."""
        reader = Reader(self.subject.model, self.choice, len(window) + more)
        reader.prefill(window[:length])
        return reader

    def measure(
        self, reader: Reader, tokens: torch.Tensor, right: torch.Tensor, step: int
    ) -> tuple[Reader, dict[str, Any]]:
        """One stretch, ``step`` tokens a forward pass; the reader after it, and what was met."""
        whole = -(-len(tokens) // step) * step
        pace = Pace(len(tokens), whole, step)
        # The text says what comes next, so no logits are asked for.
        done = walk(reader, torch.empty(0), text_source(tokens, step), pace)
        self._read += done.rows_read
        self._cold += done.rows_cold
        self._candidates += done.candidates
        self._seconds += done.seconds
        self.recalls.append(layer_recalls(done.reader))
        return done.reader, done.compared(right)[0] | self.noted(done)

    def noted(self, done: Walk) -> dict[str, Any]:
        """What a stretch tells besides; subclasses count here too."""
        return {}


class SplitCounts(NamedTuple):
    """Tokens of exact top-k sets, summed over selections, batch, heads and queries.

    Attributes:
        prompt, generated: that there were, by where they stood.
        prompt_found, generated_found: that were selected.
    """

    prompt: int = 0
    generated: int = 0
    prompt_found: int = 0
    generated_found: int = 0

    @classmethod
    def total(cls, counts: Iterable[SplitCounts]) -> SplitCounts:
        """The sums over ``counts``."""
        return cls(*map(sum, zip(*counts, strict=True)))

    def shares(self) -> dict[str, float | None]:
        """``prompt_recall`` and ``generated_recall``, None where there was no such token.

        And ``generated_share``: of all exact top-k tokens, those that were generated.
        """
        parts = {
            "prompt_recall": (self.prompt_found, self.prompt),
            "generated_recall": (self.generated_found, self.generated),
            "generated_share": (self.generated, self.prompt + self.generated),
        }
        return {name: part / whole if whole else None for name, (part, whole) in parts.items()}


class SplitIndex(CTkvrIndex):
    """Counts what is selected, reading all keys for it; it answers as any other.

    The first pass is the prompt, so read it in one.

    Attributes:
        prompt_len: slots of the first pass; 0 before it.
        counts: since the index was made or forked.
    """

    def __init__(self, options: CTkvrConfig) -> None:
        super().__init__(options)
        self.prompt_len = 0
        self.counts = SplitCounts()

    def on_forward(
        self, queries: torch.Tensor, keys: torch.Tensor, start: int, *rest: Any, **named: Any
    ) -> None:
        if start == 0:
            self.prompt_len = queries.shape[2]
        super().on_forward(queries, keys, start, *rest, **named)

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        ids = super().search(query, cold)
        found = split_counts(query, ids, cold, self.prompt_len)
        self.counts = SplitCounts.total((self.counts, found))
        return ids

    def fork(self) -> Self:
        """As every state's; counts start anew."""
        twin = super().fork()
        twin.counts = SplitCounts()
        return twin

    def state_dict(self) -> Tensors:
        """A prompt's length is not saved, and counts without it would be wrong."""
        raise NotImplementedError("caches of a study are not saved")


class SplitCTkvrCache(CTkvrCache):
    """CTkvrCache that tells recall of the prompt and of the generation apart."""

    @classmethod
    def make_index(cls, options: CTkvrConfig, layer: int) -> SplitIndex:
        """A new, empty index; the same for every layer."""
        return SplitIndex(options)

    def split_shares(self) -> dict[str, float | None]:
        """``SplitCounts.shares`` over all layers, since the cache was made or forked."""
        indexes = [layer.regions.index for layer in self.retrieval_layers if layer.regions]
        return SplitCounts.total(
            index.counts for index in indexes if isinstance(index, SplitIndex)
        ).shares()


def split_counts(
    query: torch.Tensor, ids: torch.Tensor, cold: ColdTokens, prompt_len: int
) -> SplitCounts:
    """Compare ``ids [B, H, Q, k]`` with the exact top-k, as ``measure_recall`` does.

    Tokens from slot ``prompt_len`` on were generated. Reads every key of the store.
    """
    pieces = [
        exact_scores(query, keys, cold.scale, cold.softcap) for _, keys, _ in cold.store.chunks()
    ]
    scores = torch.cat(pieces, dim=-1).masked_fill(~cold.valid[:, None, None], float("-inf"))
    relevance = group_relevance(scores, ids.shape[1])
    held = relevance.shape[-1]
    values, best = relevance.topk(min(ids.shape[-1], held), dim=-1)
    counted = values > float("-inf")
    marks = torch.zeros(*relevance.shape[:-1], held + 1, dtype=torch.bool, device=ids.device)
    marks.scatter_(-1, ids.long().masked_fill(ids < 0, held), True)
    found = marks.gather(-1, best) & counted
    generated = best >= prompt_len
    sums = (counted & ~generated, counted & generated, found & ~generated, found & generated)
    return SplitCounts(*torch.stack([one.sum() for one in sums]).tolist())


def starts_of(count: int, needed: int, length: int) -> list[int]:
    """First tokens of ``count`` passages at even distances in a context of ``length`` tokens.

    ValueError where the last of them, of ``needed`` tokens, would not end in it.
    """
    starts = [length * (number + 1) // (count + 1) for number in range(count)]
    if starts[-1] + needed > length:
        raise ValueError(
            f"--context {length}: no room for question and answer after its last "
            f"{length - starts[-1]} tokens; take shorter ones, or fewer --questions"
        )
    return starts


@dataclass
class CTkvrFollower(Follower):
    """A split cache tells in each stretch prompt and generation apart."""

    _builds: int = 0
    _scored: int = 0

    def talk(self, window: torch.Tensor, length: int, turns: int, new: int, measured: int) -> None:
        """Read ``window[:length]``, then so many ``turns``, and measure in each.

        A turn has ``new`` tokens of text, read in one pass, and ``measured`` after them, one at a
        time.
        """
        # A fork finishes the index, so that the first turn is no part of the prompt.
        reader, stretches = self.reader(window, length).fork(), []
        expected = full_choices(self.subject.model, window, start=length)
        for turn in tqdm(range(turns), leave=False, desc=self.choice.name, unit="turn"):
            asked = length + turn * (new + measured) + new
            end = asked + measured
            reader.feed(window[asked - new : asked])
            right = expected[asked - length : end - length]
            reader, found = self.measure(reader, window[asked:end], right, 1)
            stretches.append(found | {"end": (turn + 1) * measured})
        self.samples.append(stretches)

    def ask(self, window: torch.Tensor, questions: int, asked: int, answered: int) -> None:
        """Read ``window``, then measure on what follows passages of it that come again.

        A passage has ``asked`` tokens, read in one pass on a fork, and ``answered`` follow it, one
        at a time.
        """
        length = len(window)
        reader = self.reader(window, length, asked + answered)
        for start in starts_of(questions, asked + answered, length):
            middle, end = start + asked, start + asked + answered
            asking = reader.fork()
            asking.feed(window[start:middle])
            text = torch.cat([window, window[start:end]])
            right = full_choices(self.subject.model, text, start=length + asked)
            found = self.measure(asking, window[middle:end], right, 1)[1]
            self.samples.append([found | {"end": answered}])

    def result(self) -> dict[str, Any]:
        """As ``Follower.result``, with ``rerank_ratio``, candidates over selected rows.

        Candidates are counted as the lists name them, twice where two lists do. ``list_builds`` of
        all layers, ``keys_scored`` for them.
        """
        return {
            **super().result(),
            "rerank_ratio": self._candidates / self._read,
            "list_builds": self._builds,
            "keys_scored": self._scored,
        }

    def noted(self, done: Walk) -> dict[str, Any]:
        cache = done.reader.cache
        assert isinstance(cache, RetrievalCache)
        for layer in cache.stats()["layers"]:
            self._builds += layer["list_builds"]
            self._scored += layer["keys_scored"]
        return cache.split_shares() if isinstance(cache, SplitCTkvrCache) else {}
