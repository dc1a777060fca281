"""How large a haystack may be: RULER's search for the size, and its way out for long samples.

A size is in units of the task: lines, words of an essay, different words, documents. The search
tries real prompts, each with its own random draws, because that is what RULER does and what makes
the samples that follow the same as RULER's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hf_kvret.evaluation.ruler.prompts import ChatTemplate, Draft
from hf_kvret.evaluation.ruler.task import RulerTask

RETRIES = 50
"""Draws at the smallest size before a length is called too short; RULER draws for ever."""

SHORT_LEN = 4096
"""Below this length RULER counts in smaller steps."""


class Draws:
    """The random numbers of one call.

    ``python`` and ``numpy`` give what the modules ``random`` and ``numpy.random`` give after being
    seeded, without touching them. ``fresh()`` is a new generator with the same seed: RULER makes
    one for every shuffle, so lists of the same length are always shuffled the same way.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.python = random.Random(seed)
        self.numpy = np.random.RandomState(seed)

    def fresh(self) -> random.Random:
        """A generator that starts anew from the seed."""
        return random.Random(self.seed)


@dataclass(frozen=True)
class Job:
    """What one call of ``generate`` asks for.

    Attributes:
        task: the task.
        length: most tokens of prompt and answer together.
        samples: how many.
        count: tokens of a text.
        draws: the call's random numbers.
        chat_template: of the model, or None.
    """

    task: RulerTask
    length: int
    samples: int
    count: Callable[[str], int]
    draws: Draws
    chat_template: ChatTemplate | None

    def total(self, prompt: str) -> int:
        """Tokens of the prompt plus those of the answer."""
        return self.count(prompt) + self.task.max_new_tokens

    def too_short(self, needed: int) -> ValueError:
        """The error for a length that no sample fits into."""
        return ValueError(
            f"length={self.length} is too short for task {self.task.name!r}: with this tokenizer "
            f"its smallest sample takes {needed} tokens, {self.task.max_new_tokens} of them for "
            f"the answer; use a length of at least {needed}"
        )


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits, and its length in tokens with the answer's."""

    draft: Draft
    length: int


def largest_size(total: Callable[[int], int], length: int, low: int, high: int) -> int:
    """The largest size from ``low`` to ``high`` whose prompt fits into ``length`` tokens.

    ``total(size)`` draws a prompt of that size and counts it. Binary search, so it is called about
    ``log2(high - low)`` times. ``low`` where nothing fits.
    """
    best = low
    while low <= high:
        middle = (low + high) // 2
        if total(middle) <= length:
            best = middle
            low = middle + 1
        else:
            high = middle - 1
    return best


def fitting_size(
    tokens: Callable[[int], int], length: int, increment: int, other_tokens: int
) -> int:
    """The size that fits into ``length`` tokens beside ``other_tokens``, one increment at least.

    ``tokens(size)`` draws a prompt of that size and counts it. A first prompt of one increment
    gives an estimate, and the search goes up to three times that.
    """
    per_unit = tokens(increment) / increment
    high = max(int((length / per_unit) * 3), increment * 2)
    return largest_size(lambda size: tokens(size) + other_tokens, length, increment, high)


def smaller(size: int, increment: int, smallest: int) -> int:
    """The next size to try: an increment less, until one is reached.

    RULER may step below what a task needs for its needles and then never ends; ``smallest`` is
    where we stop instead.
    """
    return max(size - increment, smallest) if size > increment else size


def draw_fitting(
    job: Job, build: Callable[[int], Draft], size: int, increment: int, smallest: int = 1
) -> Fitted:
    """A prompt that fits, drawn again with an increment less as long as it is too long.

    Raises:
        ValueError: the smallest size never fitted; names the length that would do.
    """
    needed = 0
    tries = 0
    while tries < RETRIES:
        draft = build(size)
        total = job.total(draft.prompt)
        if total <= job.length:
            return Fitted(draft, total)
        reduced = smaller(size, increment, smallest)
        if reduced == size:
            tries += 1
            needed = max(needed, total)
        size = reduced
    raise job.too_short(needed)
