"""The task ``vt`` of RULER, variable tracking (arXiv 2404.06654, section 3.2).

A chain of assignments, ``VAR B = VAR A``, is hidden in noise; all variables that have the value of
the first one are asked for. An example with its answer comes first. Templates and order of the
random draws are those of ``scripts/data/synthetic/variable_tracking.py`` in NVIDIA/RULER
(Apache-2.0).
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from itertools import pairwise

from hf_kvret.evaluation.ruler.fitting import (
    SHORT_LEN,
    Draws,
    Fitted,
    Job,
    draw_fitting,
    fitting_size,
    smaller,
)
from hf_kvret.evaluation.ruler.niah import NOISE
from hf_kvret.evaluation.ruler.prompts import Draft, Template

NAMES = 5
"""Variables in the chain: the first and four hops. Also the least number of noise lines."""

_NAME_LEN = 5
_EXAMPLE_NAME_LEN = 3
_EXAMPLE_VALUE = "12345"
_EXAMPLE_LEN = 500
_EXAMPLE_INCREMENT = 5

_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} "
    "variables are assigned the value {query}, they are: "
)


def _name(draws: Draws, length: int) -> str:
    return "".join(draws.python.choices(string.ascii_uppercase, k=length))


def _value(draws: Draws) -> str:
    return str(draws.numpy.randint(10_000, 99_999))


def _names(draws: Draws, length: int) -> list[str]:
    """Five different names. (RULER fails if two of its first five are the same, one in 10⁶.)"""
    names = [_name(draws, length) for _ in range(NAMES)]
    while len(set(names)) < NAMES:
        names.append(_name(draws, length))
    return list(dict.fromkeys(names))


def _draft(template: Template, draws: Draws, size: int, names: list[str], value: str) -> Draft:
    """A prompt with the chain in ``size`` lines of noise."""
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {previous} " for previous, name in pairwise(names)]
    lines = [NOISE] * size
    places = sorted(draws.python.sample(range(size), NAMES))
    for added, (place, statement) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + added, statement)
    context = "\n".join(lines).replace(". \n", ".\n")
    return template.fill(context, tuple(names), query=value, num_v=NAMES)


class Example:
    """The one-shot example: made once, with other names and another value for every sample."""

    def __init__(self, job: Job) -> None:
        self._draws = job.draws
        draft = _example_draft(job)
        self._names = draft.outputs
        self.text = f"{draft.prompt} {' '.join(self._names)}\n"

    def renewed(self) -> str:
        """The example with new names and value, replaced one after the other wherever they occur.

        So a name that is drawn twice, or that is part of another word, changes more than itself;
        RULER does the same.
        """
        text = self.text
        for name in self._names:
            text = text.replace(name, _name(self._draws, len(name)))
        return text.replace(_EXAMPLE_VALUE, _value(self._draws))


def _example_draft(job: Job) -> Draft:
    """An example of at most 500 tokens, or the smallest there is.

    RULER never ends if five lines of noise take more than 500 tokens, as with a tokenizer of
    bytes; we take those five lines.
    """
    draws = job.draws
    template = Template.make(_TEMPLATE, _PREFIX, None)

    def draft(size: int) -> Draft:
        names = _names(draws, _EXAMPLE_NAME_LEN)
        return _draft(template, draws, size, names, _EXAMPLE_VALUE)

    increment = _EXAMPLE_INCREMENT
    size = fitting_size(lambda size: job.count(draft(size).prompt), _EXAMPLE_LEN, increment, 0)
    while True:
        drawn = draft(size)
        reduced = smaller(size, increment, NAMES)
        if job.count(drawn.prompt) <= _EXAMPLE_LEN or reduced == size:
            return drawn
        size = reduced


def tracking_samples(job: Job) -> Iterator[Fitted]:
    """The samples of ``vt``.

    Raises:
        ValueError: the length is too short.
    """
    draws = job.draws
    example = Example(job)
    example_len = job.count(example.text)
    template = Template.make(_TEMPLATE, _PREFIX, job.chat_template)

    def question(size: int) -> Draft:
        return _draft(template, draws, size, _names(draws, _NAME_LEN), _value(draws))

    def shown(size: int) -> Draft:
        # The example's names are drawn after everything else of the prompt.
        asked = question(size)
        return template.with_example(asked, f"{example.renewed()}\n")

    increment = 10 if job.length >= SHORT_LEN else 5
    size = fitting_size(
        lambda size: job.count(question(size).prompt),
        job.length,
        increment,
        example_len + job.task.max_new_tokens,
    )
    for _ in range(job.samples):
        yield draw_fitting(job, shown, size, increment, smallest=NAMES)
