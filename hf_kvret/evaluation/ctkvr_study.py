"""Following tokens through one variant of CTkvr, in the ways that its ablation asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from hf_kvret.cache import RetrievalCache
from hf_kvret.evaluation.caches import CacheChoice
from hf_kvret.evaluation.following import full_choices
from hf_kvret.evaluation.reader import Reader
from hf_kvret.evaluation.split_recall import SplitCTkvrCache
from hf_kvret.evaluation.stretches import Pace, Walk, mean_of, mean_stretches, text_source, walk
from hf_kvret.evaluation.subject import Subject

_MEANS = ("overlap", "mass", "best_mass", "equal")


@dataclass(frozen=True)
class Turns:
    """A talk: stretches of new text, and what is measured after each.

    Attributes:
        count: of turns.
        new: tokens of new text in a turn, read in one pass.
        measured: tokens after them, one at a time.
    """

    count: int
    new: int
    measured: int

    def __post_init__(self) -> None:
        if min(self.count, self.new, self.measured) < 1:
            raise ValueError(
                f"--turns {self.count}, --turn-tokens {self.new}, --turn-measured "
                f"{self.measured}: at least 1 each"
            )

    @property
    def tokens(self) -> int:
        """Of all turns."""
        return self.count * (self.new + self.measured)


@dataclass(frozen=True)
class Questions:
    """Passages of the context that come again.

    Attributes:
        count: of passages, at even distances; each is asked on a fork.
        asked: tokens of a passage, read in one pass.
        answered: tokens that follow the passage in the context, one at a time.
    """

    count: int
    asked: int
    answered: int

    def __post_init__(self) -> None:
        if min(self.count, self.answered) < 1 or self.asked < 2:
            raise ValueError(
                f"--questions {self.count}, --question-tokens {self.asked}, --answer-tokens "
                f"{self.answered}: at least 1 each, and 2 tokens of a question"
            )

    def starts(self, length: int) -> list[int]:
        """First tokens of the passages in a context of ``length`` tokens.

        ValueError where the last of them would not end in it.
        """
        starts = [length * (number + 1) // (self.count + 1) for number in range(self.count)]
        if starts[-1] + self.asked + self.answered > length:
            raise ValueError(
                f"--lengths {length}: no room for question and answer after its last "
                f"{length - starts[-1]} tokens; take shorter ones, or fewer --questions"
            )
        return starts


@dataclass
class Study:
    """What was met by one variant, over all its contexts.

    Attributes:
        subject: the model.
        choice: the variant.
        samples: for each context the stretches that were measured, as ``Walk.stretches`` with
            ``equal``, the share of tokens that are full attention's.
    """

    subject: Subject
    choice: CacheChoice
    samples: list[list[dict[str, Any]]] = field(default_factory=list)
    _read: int = 0
    _cold: int = 0
    _candidates: int = 0
    _builds: int = 0
    _scored: int = 0
    _seconds: float = 0.0

    def follow(self, window: torch.Tensor, length: int, pace: Pace) -> None:
        """Read ``window[:length]``, then measure stretches of the ``pace.count`` tokens after it.

        A split cache tells in each stretch prompt and generation apart.
        """
        reader, stretches = self._reader(window, length), []
        expected = full_choices(self.subject.model, window, start=length)
        with tqdm(total=pace.count, leave=False, desc=self.choice.name, mininterval=1) as bar:
            for start in range(0, pace.count, pace.every):
                end = min(start + pace.every, pace.count)
                tokens, right = window[length + start : length + end], expected[start:end]
                reader, found = self._measure(reader, tokens, right, pace.step)
                if isinstance(reader.cache, SplitCTkvrCache):
                    found |= reader.cache.split_shares()
                stretches.append(found | {"end": end})
                bar.update(end - start)
        self.samples.append(stretches)

    def talk(self, window: torch.Tensor, length: int, turns: Turns) -> None:
        """Read ``window[:length]``, then ``turns.count`` times new text, and measure after it."""
        # A fork finishes the index, so that the first turn is no part of the prompt.
        reader, stretches = self._reader(window, length).fork(), []
        expected = full_choices(self.subject.model, window, start=length)
        for turn in tqdm(range(turns.count), leave=False, desc=self.choice.name, unit="turn"):
            start = length + turn * (turns.new + turns.measured)
            asked = start + turns.new
            end = asked + turns.measured
            reader.feed(window[start:asked])
            right = expected[asked - length : end - length]
            reader, found = self._measure(reader, window[asked:end], right, 1)
            stretches.append(found | {"end": (turn + 1) * turns.measured})
        self.samples.append(stretches)

    def ask(self, window: torch.Tensor, questions: Questions) -> None:
        """Read ``window``, then measure on what follows each passage that comes again."""
        length = len(window)
        reader = self._reader(window, length, questions.asked + questions.answered)
        for start in questions.starts(length):
            middle, end = start + questions.asked, start + questions.asked + questions.answered
            asking = reader.fork()
            asking.feed(window[start:middle])
            text = torch.cat([window, window[start:end]])
            right = full_choices(self.subject.model, text, start=length + questions.asked)
            found = self._measure(asking, window[middle:end], right, 1)[1]
            self.samples.append([found | {"end": questions.answered}])

    def result(self) -> dict[str, Any]:
        """Means over contexts, and what was read, as plain JSON values.

        ``candidate_ratio`` and ``read_ratio`` are shares of the cold rows, ``rerank_ratio`` is
        candidates over selected rows. Candidates are counted as the lists name them, twice where
        two lists do. ``list_builds`` of all layers, ``keys_scored`` for them.

        Raises:
            ValueError: nothing was cold.
        """
        if not self._cold:
            raise ValueError(
                "nothing was cold: take longer --lengths, or smaller regions as "
                "ctkvr:dense_below=0:recent=64:flush=64"
            )
        stretches = mean_stretches(self.samples)
        return {
            **{name: mean_of(stretches, name) for name in _MEANS},
            "stretches": stretches,
            "candidate_ratio": self._candidates / self._cold,
            "read_ratio": self._read / self._cold,
            "rerank_ratio": self._candidates / self._read,
            "list_builds": self._builds,
            "keys_scored": self._scored,
            "seconds_with_recall": self._seconds,
        }

    def _reader(self, window: torch.Tensor, length: int, more: int = 0) -> Reader:
        reader = Reader(self.subject.model, self.choice, len(window) + more)
        reader.prefill(window[:length])
        return reader

    def _measure(
        self, reader: Reader, tokens: torch.Tensor, right: torch.Tensor, step: int
    ) -> tuple[Reader, dict[str, Any]]:
        """One stretch; the reader after it."""
        whole = -(-len(tokens) // step) * step
        pace = Pace(len(tokens), whole, step)
        # The text says what comes next, so no logits are asked for.
        done = walk(reader, torch.empty(0), text_source(tokens, step), pace)
        self._count(done)
        return done.reader, done.compared(right)[0]

    def _count(self, done: Walk) -> None:
        self._read += done.rows_read
        self._cold += done.rows_cold
        self._candidates += done.candidates
        self._seconds += done.seconds
        assert isinstance(done.reader.cache, RetrievalCache)
        for layer in done.reader.cache.stats()["layers"]:
            self._builds += layer["list_builds"]
            self._scored += layer["keys_scored"]
