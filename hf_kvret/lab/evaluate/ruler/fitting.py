"""How large a haystack may be: RULER's search for the size, and its way out for long samples.

A size is in units of the task: lines, words of an essay, different words, documents. The search
tries real prompts, each with its own random draws, because that is what RULER does and what makes
the samples that follow the same as RULER's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_kvret.lab.evaluate.ruler.task import Draft, RulerTask

ChatTemplate = Callable[[str], str]
"""Puts a user's message into the model's chat format, up to and with the assistant's header."""

TEMPLATES: dict[str, Any] = json.loads(Path(__file__).with_name("templates.json").read_bytes())
"""A family's text and answer prefix, a needle, and a line of noise; placeholders in braces."""

# Draws at the smallest size before a length is called too short; RULER draws for ever.
RETRIES = 50


class Template:
    """A task's text inside a chat template, which is called once with the text unfilled.

    Raises:
        ValueError: what the chat template returned doesn't hold the text unchanged and once.
    """

    def __init__(self, text: str, answer_prefix: str, chat_template: ChatTemplate | None) -> None:
        rendered = text if chat_template is None else chat_template(text)
        if rendered.count(text) != 1:
            raise ValueError(
                f"chat_template returned {rendered[:80]!r}...: it must return a text that holds "
                f"the message it is given once and unchanged, braces included"
            )
        self._opening, _, self._closing = rendered.partition(text)
        self._head, _, self._tail = text.partition("{context}")
        self._prefix = answer_prefix

    def fill(
        self, context: str, outputs: tuple[str, ...], example: str = "", **fields: object
    ) -> Draft:
        """The prompt around a haystack; ``example`` stands before the task's text."""
        parts = (self._head, self._tail, self._prefix)
        head, tail, prefix = (part.format(**fields) for part in parts)
        return Draft(
            self._opening + example + head + context, tail + self._closing, prefix, outputs
        )


class Draws:
    """The random numbers of one call: what the modules give after being seeded, left untouched."""

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)
        self.numpy = np.random.RandomState(seed)
        self._seed = seed

    def text(self, letters: str, length: int) -> str:
        """A random text of some of the letters."""
        return "".join(self.python.choices(letters, k=length))

    def shuffle(self, items: list[Any]) -> None:
        """Shuffle in place; as in RULER lists of one length are always shuffled alike."""
        random.Random(self._seed).shuffle(items)


@dataclass(frozen=True)
class Job:
    """What one call of ``generate`` asks for; ``count`` gives the tokens of a text."""

    task: RulerTask
    length: int
    samples: int
    count: Callable[[str], int]
    draws: Draws
    chat_template: ChatTemplate | None = None

    @property
    def long(self) -> bool:
        """Whether RULER counts in its usual steps; below 4096 tokens they are smaller."""
        return self.length >= 4096

    def total(self, draft: Draft) -> int:
        """Tokens of the prompt plus those of the answer."""
        return self.count(draft.prompt) + self.task.max_new_tokens


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """The number of tokens of a text; TypeError for what can't encode."""
    encode: Callable[[str], Sized] = getattr(tokenizer, "encode", tokenizer)
    if not callable(encode):
        raise TypeError(
            f"tokenizer={tokenizer!r} has no encode method and can't be called: give a tokenizer "
            f"or a function from a text to its tokens"
        )

    def count(text: str) -> int:
        tokens = len(encode(text))
        if not tokens:
            raise ValueError(f"tokenizer={tokenizer!r} makes no tokens of {text[:60]!r}...")
        return tokens

    return count


def largest_size(total: Callable[[int], int], length: int, low: int, high: int) -> int:
    """The largest size from ``low`` to ``high`` whose prompt fits into ``length`` tokens.

    ``total(size)`` draws a prompt and counts it. ``low`` where nothing fits.
    """
    best = low
    while low <= high:
        middle = (low + high) // 2
        if total(middle) <= length:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def fitting_size(
    tokens: Callable[[int], int], length: int, increment: int, other_tokens: int
) -> int:
    """The size that fits into ``length`` tokens beside ``other_tokens``, one increment at least.

    ``tokens(size)`` draws a prompt and counts it. A first prompt of one increment gives an
    estimate, and the search goes up to three times that.
    """
    per_unit = tokens(increment) / increment
    high = max(int((length / per_unit) * 3), increment * 2)
    return largest_size(lambda size: tokens(size) + other_tokens, length, increment, high)


def smaller(size: int, increment: int, smallest: int) -> int:
    """The next size to try, an increment less; RULER goes below ``smallest`` and may never end."""
    return max(size - increment, smallest) if size > increment else size


def draw_fitting(
    job: Job, build: Callable[[int], Draft], size: int, increment: int, smallest: int = 1
) -> tuple[Draft, int]:
    """A prompt that fits and its length, drawn again with an increment less while it is too long.

    Raises:
        ValueError: the smallest size never fitted; names the length that would do.
    """
    needed = tries = 0
    while tries < RETRIES:
        draft = build(size)
        total = job.total(draft)
        if total <= job.length:
            return draft, total
        less = smaller(size, increment, smallest)
        if less == size:
            tries += 1
            needed = max(needed, total)
        size = less
    raise ValueError(
        f"length={job.length} is too short for task {job.task.name!r}: with this tokenizer "
        f"its smallest sample takes {needed} tokens, {job.task.max_new_tokens} of them for "
        f"the answer; use a length of at least {needed}"
    )
