"""Following tokens through one variant of CTkvr, in the ways that its ablation asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from follower import Follower
from split_recall import SplitCTkvrCache
from tqdm import tqdm

from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.following import full_choices
from hf_kvret.evaluation.stretches import Walk


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
