"""The needle-in-a-haystack tasks ``niah_*`` of RULER (arXiv 2404.06654, section 3.1).

Needles are sentences that give a key's value. They are hidden in repeated noise, in essays, or
among other needles, and the values of some keys are asked for. Templates and order of the random
draws are those of ``scripts/data/synthetic/niah.py`` in NVIDIA/RULER (Apache-2.0).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from hf_kvret.evaluation.ruler.fitting import (
    SHORT_LEN,
    Draws,
    Fitted,
    Job,
    draw_fitting,
    fitting_size,
)
from hf_kvret.evaluation.ruler.prompts import Draft, Template
from hf_kvret.evaluation.ruler.sentences import Splitter
from hf_kvret.evaluation.ruler.words import adjective_noun_pairs

Haystack = Literal["noise", "essay", "needle"]
Kind = Literal["words", "numbers", "uuids"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The one line of the noise haystack, here and in ``vt``."""

_NEEDLE = "One of the special magic {type_v} for {key} is: {value}."
_TEMPLATE = (
    "Some special magic {type_v} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type_v} afterwards.\n{context}\n"
    "What are all the special magic {type_v} for {query} mentioned in the provided text?"
)
_PREFIX = " The special magic {type_v} for {query} mentioned in the provided text are"
_SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))

# Where needles may stand in an essay, in percent of its sentences.
_DEPTHS: list[int] = np.round(np.linspace(0, 100, num=40)).astype(int).tolist()


@dataclass(frozen=True)
class NeedleTask:
    """What tells one ``niah_*`` task from another.

    Attributes:
        haystack: what needles are hidden in.
        key, value: what keys and values look like.
        keys: how many keys there are.
        values: how many values each has, one needle for each.
        queries: how many of the keys are asked for.
    """

    haystack: Haystack
    key: Kind
    value: Kind
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLE_TASKS = {
    "niah_single_1": NeedleTask("noise", "words", "numbers"),
    "niah_single_2": NeedleTask("essay", "words", "numbers"),
    "niah_single_3": NeedleTask("essay", "words", "uuids"),
    "niah_multikey_1": NeedleTask("essay", "words", "numbers", keys=4),
    "niah_multikey_2": NeedleTask("needle", "words", "numbers"),
    "niah_multikey_3": NeedleTask("needle", "uuids", "uuids"),
    "niah_multivalue": NeedleTask("essay", "words", "numbers", values=4),
    "niah_multiquery": NeedleTask("essay", "words", "numbers", keys=4, queries=4),
}
"""The ``niah_*`` tasks. ``multiquery`` has as many keys as it asks for, as RULER makes it."""


class Essays:
    """The sentences of the first words of the essays, over and over where these end."""

    def __init__(self, words: Sequence[str], splitter: Splitter) -> None:
        self._words = list(words)
        self._splitter = splitter
        # Most samples of a call have the same number of words.
        self.sentences = lru_cache(maxsize=4)(self._sentences)

    def _sentences(self, count: int) -> list[str]:
        """The sentences of the first ``count`` words."""
        repeats = -(-count // len(self._words))
        text = " ".join((self._words * repeats)[:count])
        return self._splitter.split(text.strip())


class NeedleMaker:
    """Draws prompts of one ``niah_*`` task.

    ``essays`` is needed by tasks with that haystack and by no other.
    """

    def __init__(
        self, kind: NeedleTask, template: Template, draws: Draws, essays: Essays | None
    ) -> None:
        self._kind = kind
        self._template = template
        self._draws = draws
        self._essays = essays
        self._words = adjective_noun_pairs() if kind.key == "words" else None

    def draft(self, size: int) -> Draft:
        """A prompt with a haystack of ``size`` lines, words or needles."""
        kind, rng = self._kind, self._draws.python
        keys: list[str] = []
        values: list[list[str]] = []
        needles: list[str] = []
        for _ in range(kind.keys):
            keys.append(self._random(kind.key))
            values.append([])
            for _ in range(kind.values):
                values[-1].append(self._random(kind.value))
                needles.append(self._needle(keys[-1], values[-1][-1]))
        self._draws.fresh().shuffle(needles)
        context = self._in_essay(needles, size) if self._essays else self._in_lines(needles, size)
        asked = rng.sample(range(kind.keys), kind.queries)
        queries = [keys[i] for i in asked]
        # "a", or "a, b, and c"; RULER has the comma also in "a, and b".
        query = ", and ".join(filter(None, [", ".join(queries[:-1]), queries[-1]]))
        outputs = tuple(value for i in asked for value in values[i])
        type_v = kind.value[:-1] if _is_single(kind) else kind.value
        return self._template.fill(context, outputs, type_v=type_v, query=query)

    def _random(self, kind: Kind) -> str:
        rng = self._draws.python
        if kind == "numbers":
            return str(rng.randint(1_000_000, 9_999_999))
        if kind == "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        assert self._words is not None
        return rng.choice(self._words)

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(type_v=self._kind.value, key=key, value=value)

    def _in_essay(self, needles: list[str], size: int) -> str:
        """Needles between the sentences of an essay of ``size`` words."""
        assert self._essays is not None
        sentences = self._essays.sentences(size)
        depths = self._draws.python.sample(_DEPTHS, len(needles))
        starts = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        parts: list[str] = []
        last = 0
        for start, needle in zip(starts, needles, strict=True):
            # At depth 0 the part is empty and leaves a blank, as in RULER.
            parts += [" ".join(sentences[last:start]), needle]
            last = start
        parts.append(" ".join(sentences[last:]))
        return " ".join(parts)

    def _in_lines(self, needles: list[str], size: int) -> str:
        """Needles between ``size`` lines of noise, or between as many other needles."""
        kind = self._kind
        if kind.haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [
                self._needle(self._random(kind.key), self._random(kind.value)) for _ in range(size)
            ]
        places = sorted(self._draws.python.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)


def _is_single(kind: NeedleTask) -> bool:
    return kind.queries * kind.values == 1


def needle_samples(job: Job, essays: Callable[[], Essays]) -> Iterator[Fitted]:
    """The samples of a ``niah_*`` task.

    With a single value asked for, template and answer prefix are put into the singular, the
    needles are not. The chat template is left alone; RULER would change its "are" to "is" too.

    Raises:
        ValueError: the length is too short.
        ModuleNotFoundError: wonderwords is not installed.
    """
    kind = NEEDLE_TASKS[job.task.name]
    text, prefix = _TEMPLATE, _PREFIX
    if _is_single(kind):
        for plural, singular in _SINGULAR:
            text, prefix = text.replace(plural, singular), prefix.replace(plural, singular)
    template = Template.make(text, prefix, job.chat_template)
    of_essay = kind.haystack == "essay"
    maker = NeedleMaker(kind, template, job.draws, essays() if of_essay else None)
    line_increment = 25 if job.length >= SHORT_LEN else 5
    increment = 500 if of_essay else line_increment
    size = fitting_size(
        lambda size: job.count(maker.draft(size).prompt),
        job.length,
        increment,
        job.task.max_new_tokens,
    )
    for _ in range(job.samples):
        yield draw_fitting(job, maker.draft, size, increment)
