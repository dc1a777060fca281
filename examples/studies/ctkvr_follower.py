"""Following tokens through one variant of CTkvr, and telling recall apart by place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from follower import Follower
from tqdm import tqdm

from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.following import full_choices
from hf_kvret.evaluation.stretches import Walk
from hf_kvret.index import ColdTokens
from hf_kvret.methods.ctkvr import CTkvrCache, CTkvrConfig, CTkvrIndex
from hf_kvret.recall import exact_scores
from hf_kvret.relevance import group_relevance


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

    def watch(
        self, queries: torch.Tensor, keys: torch.Tensor, start: int, *rest: Any, **named: Any
    ) -> None:
        if start == 0:
            self.prompt_len = queries.shape[2]
        super().watch(queries, keys, start, *rest, **named)

    def select(self, query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        ids = super().select(query, *rest, **named)
        assert self._cold is not None
        found = split_counts(query, ids, self._cold, self.prompt_len)
        self.counts = SplitCounts.total((self.counts, found))
        return ids

    def fork(self) -> Self:
        twin = super().fork()
        twin.prompt_len = self.prompt_len
        return twin

    def state_dict(self) -> dict[str, torch.Tensor]:
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
            f"--lengths {length}: no room for question and answer after its last "
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
