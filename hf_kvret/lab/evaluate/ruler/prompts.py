"""RULER's prompts: needles, chains, lists and documents (arXiv 2404.06654, section 3).

A class for each family of tasks. Templates and the order of the random draws are those of
``scripts/data/synthetic`` in NVIDIA/RULER (Apache-2.0). The size of a haystack is in units of the
task: lines, words of an essay, different words, documents. The search for it tries real prompts,
each with its own random draws, because RULER does so and the samples that follow are then RULER's.
"""

from __future__ import annotations

import json
import math
import random
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hf_kvret.lab.evaluate.ruler import texts
from hf_kvret.lab.evaluate.ruler.task import TASKS, Draft, RulerTask, Sample, Symbols
from hf_kvret.lab.evaluate.ruler.texts import RulerData
from hf_kvret.lab.evaluate.texts import Chat

TEMPLATES: dict[str, Any] = json.loads(Path(__file__).with_name("templates.json").read_bytes())
"""A family's text and answer prefix, a needle, and a line of noise; placeholders in braces."""

NOISE: str = TEMPLATES["noise"]
"""The one line of the noise haystack, of ``niah_single_1`` and ``vt``."""

# Draws at the smallest size before a length is called too short; RULER draws for ever.
RETRIES = 50
# Where needles may stand in an essay, in percent of its sentences.
_DEPTHS: list[int] = np.round(np.linspace(0, 100, num=40)).astype(int).tolist()
# Variables in a chain: the first and four hops.
_VARIABLES = 5
_EXAMPLE_VALUE = "12345"
_ZETA = math.pi**2 / 6  # the zeta function at 2
_NO_DATA = RulerData()


class Template:
    """A task's text with placeholders in braces, inside a chat or alone."""

    def __init__(self, text: str, answer_prefix: str, chat: Chat = ("", "")) -> None:
        self._opening, self._closing = chat
        self._head, _, self._tail = text.partition("{context}")
        self._prefix = answer_prefix

    def fill(
        self, context: str, outputs: tuple[str, ...], example: str = "", **fields: object
    ) -> Draft:
        """The prompt around a haystack; ``example`` stands before the task's text."""
        texts = (self._head, self._tail, self._prefix)
        head, tail, prefix = (text.format(**fields) for text in texts)
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
    """The arguments of one call of ``generate``."""

    task: RulerTask
    encode: Callable[[str], Sized]
    length: int
    samples: int
    draws: Draws
    data: RulerData
    chat: Chat

    @property
    def long(self) -> bool:
        """Whether RULER counts in its usual steps; below 4096 tokens they are smaller."""
        return self.length >= 4096

    def count(self, text: str) -> int:
        """The tokens of a text; ValueError for none."""
        tokens = len(self.encode(text))
        if not tokens:
            raise ValueError(f"the tokenizer makes no tokens of {text[:60]!r}...: give another")
        return tokens


def largest_size(total: Callable[[int], int], length: int, low: int, high: int) -> int:
    """The largest size up to ``high`` whose prompt fits into ``length`` tokens; ``low`` at least.

    ``total(size)`` draws a prompt and counts it.
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


class Prompts(ABC):
    """Draws the prompts of a task; ``increment`` and ``smallest`` bound how the size shrinks."""

    smallest = 1

    def __init__(self, job: Job, template: str, increment: int) -> None:
        self.job, self.draws, self.increment = job, job.draws, increment
        text, answer_prefix = TEMPLATES[template]
        self.template = Template(text, answer_prefix, job.chat)
        self.other_tokens = job.task.max_new_tokens
        self.begin(0)

    def begin(self, index: int) -> None:
        """Go on to the sample of that number."""
        self.index = index

    @abstractmethod
    def draft(self, size: int) -> Draft:
        """A prompt with a haystack of ``size`` units: lines, words or documents."""

    def tokens(self, size: int) -> int:
        """Tokens of a prompt of that size, which is drawn for it."""
        return self.job.count(self.draft(size).prompt)

    def size(self) -> int:
        """The size that fits into the job's length, found with draws of its own."""
        return fitting_size(self.tokens, self.job.length, self.increment, self.other_tokens)

    def sample(self, index: int, size: int) -> Sample:
        """The sample of that number, drawn again with an increment less while it is too long.

        Raises:
            ValueError: the smallest size never fitted; names the length that would do.
        """
        self.begin(index)
        length, task = self.job.length, self.job.task
        needed = tries = 0
        while tries < RETRIES:
            draft = self.draft(size)
            total = self.job.count(draft.prompt) + task.max_new_tokens
            if total <= length:
                return Sample(**vars(draft), index=index, length=total)
            less = smaller(size, self.increment, self.smallest)
            if less == size:
                tries += 1
                needed = max(needed, total)
            size = less
        raise ValueError(
            f"length={length} is too short for task {task.name!r}: with this tokenizer its "
            f"smallest sample takes {needed} tokens, {task.max_new_tokens} of them for the answer; "
            f"use a length of at least {needed}"
        )


class Needles(Prompts):
    """``niah_*``: sentences that give the values of keys, hidden in noise, essays or each other.

    With a single value asked for, template and answer prefix are in the singular, the needles are
    not. The chat template is left alone; RULER would change its "are" to "is" too.
    """

    def __init__(self, job: Job) -> None:
        task = self._task = job.task
        one = task.queries * task.values == 1
        increment = 500 if task.data else 25 if job.long else 5
        super().__init__(job, "niah_one" if one else "niah", increment)
        self._type = task.value[:-1] if one else task.value
        self._words = texts.read_essay_words(job.data, task.name) if task.data else []
        self._split = texts.best_splitter()
        # Most samples of a call have the same number of words.
        self._sentences = lru_cache(maxsize=4)(self._split_words)
        self._pairs = texts.adjective_noun_pairs()

    def draft(self, size: int) -> Draft:
        task = self._task
        facts = [(self._random(task.key), self._values()) for _ in range(task.keys)]
        needles = [self._needle(key, value) for key, values in facts for value in values]
        self.draws.shuffle(needles)
        context = self._in_essay(needles, size) if task.data else self._in_lines(needles, size)
        queries = self.draws.python.sample(facts, task.queries)
        *keys, last = [key for key, _ in queries]
        # "a", or "a, b, and c"; RULER has the comma also in "a, and b".
        query = f"{', '.join(keys)}, and {last}" if keys else last
        outputs = tuple(value for _, values in queries for value in values)
        return self.template.fill(context, outputs, type_v=self._type, query=query)

    def _values(self) -> list[str]:
        return [self._random(self._task.value) for _ in range(self._task.values)]

    def _random(self, symbols: Symbols) -> str:
        rng = self.draws.python
        if symbols == "numbers":
            return str(rng.randint(1_000_000, 9_999_999))
        if symbols == "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return rng.choice(self._pairs)

    def _needle(self, key: str, value: str) -> str:
        return str(TEMPLATES["needle"]).format(type_v=self._task.value, key=key, value=value)

    def _split_words(self, count: int) -> list[str]:
        """The sentences of the first ``count`` words, over and over where these end."""
        repeats = -(-count // len(self._words))
        return self._split(" ".join((self._words * repeats)[:count]).strip())

    def _in_essay(self, needles: list[str], size: int) -> str:
        sentences = self._sentences(size)
        depths = self.draws.python.sample(_DEPTHS, len(needles))
        starts = [int(len(sentences) * (depth / 100)) for depth in sorted(depths)]
        # At depth 0 the part before a needle is empty and leaves a blank, as in RULER.
        gaps = [" ".join(sentences[i:j]) for i, j in pairwise([0, *starts, len(sentences)])]
        texts = [text for pair in zip(gaps, [*needles, ""], strict=True) for text in pair]
        return " ".join(texts[:-1])

    def _in_lines(self, needles: list[str], size: int) -> str:
        lines = [NOISE] * size
        if self._task.haystack == "needles":
            lines = [self._needle(self._random(self._task.key), *self._values()) for _ in lines]
        indices = sorted(self.draws.python.sample(range(size), len(needles)), reverse=True)
        for index, needle in zip(indices, needles, strict=True):
            lines.insert(index, needle)
        return "\n".join(lines)


class Chains(Prompts):
    """``vt``: a chain of assignments, ``VAR B = VAR A``, in lines of noise.

    All variables that have the value of the first one are asked for. An example comes first; it is
    made once and gets other names and another value for every sample.
    """

    smallest = _VARIABLES

    def __init__(self, job: Job) -> None:
        super().__init__(job, "vt", 10 if job.long else 5)
        example = self._example()
        self._names = example.outputs
        self._text = f"{example.prompt} {' '.join(self._names)}\n"
        self.other_tokens += job.count(self._text)

    def _example(self) -> Draft:
        """An example of at most 500 tokens, or the smallest there is.

        RULER never ends if five lines of noise take more than 500 tokens, as with a tokenizer of
        bytes; we take those five lines.
        """
        text, answer_prefix = TEMPLATES["vt"]
        template, count = Template(text, answer_prefix), self.job.count

        def draft(size: int) -> Draft:
            return self._chain(template, size, self._new_names(3), _EXAMPLE_VALUE)

        size = fitting_size(lambda size: count(draft(size).prompt), 500, 5, other_tokens=0)
        example = draft(size)
        while count(example.prompt) > 500 and (less := smaller(size, 5, _VARIABLES)) < size:
            size, example = less, draft(less)
        return example

    def tokens(self, size: int) -> int:
        """Tokens of a prompt with the example, whose names are not drawn for it."""
        question = self._chain(self.template, size, self._new_names(5), self._value())
        return self.job.count(question.prompt)

    def draft(self, size: int) -> Draft:
        names, value = self._new_names(5), self._value()
        return self._chain(self.template, size, names, value, self._renewed_example)

    def _chain(
        self,
        template: Template,
        size: int,
        names: list[str],
        value: str,
        example: Callable[[], str] = str,
    ) -> Draft:
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {name} = VAR {previous} " for previous, name in pairwise(names)]
        lines = [NOISE] * size
        indices = sorted(self.draws.python.sample(range(size), _VARIABLES))
        for added, (index, statement) in enumerate(zip(indices, chain, strict=True)):
            lines.insert(index + added, statement)
        context = "\n".join(lines).replace(". \n", ".\n")
        # The example's names are drawn after everything else of the prompt.
        return template.fill(context, tuple(names), example(), query=value, num_v=_VARIABLES)

    def _renewed_example(self) -> str:
        """The example with new names and value, replaced one after the other wherever they occur.

        So a name that is drawn twice, or that is part of another word, changes more than itself;
        RULER does the same.
        """
        text = self._text
        for name in self._names:
            text = text.replace(name, self.draws.text(string.ascii_uppercase, len(name)))
        return text.replace(_EXAMPLE_VALUE, self._value()) + "\n"

    def _value(self) -> str:
        return str(self.draws.numpy.randint(10_000, 99_999))

    def _new_names(self, length: int) -> list[str]:
        """Five different names. (RULER fails if two of its first five are the same, one in 10⁶.)"""
        names: dict[str, None] = {}
        while len(names) < _VARIABLES:
            names[self.draws.text(string.ascii_uppercase, length)] = None
        return list(names)


class CommonWords(Prompts):
    """``cwe``: numbered words, of which ten are common.

    Below 4096 tokens the common words come 6 times and the others once, else 30 and 3 times.
    ``data.english_words`` stand in for wonderwords where a list needs more words than these have.
    RULER's own samples at such lengths, where the search for the size tries such lists, need
    RULER's words.
    """

    smallest = 10

    def __init__(self, job: Job) -> None:
        super().__init__(job, "cwe", 10)
        self._more = texts.read_english_words(job.data, job.task.name)
        self._words = texts.single_words()
        self.draws.shuffle(self._words)

    def size(self) -> int:
        length, most = self.job.length, max(len(self._words), len(self._more))
        # Twice the estimate here, where the other tasks have three times.
        estimate = max(int(length // (self.tokens(4096) / 4096)) * 2, 20)
        high = min(estimate, most)
        size = largest_size(lambda size: self.tokens(size) + self.other_tokens, length, 10, high)
        if size == high < estimate:
            raise ValueError(
                f"length={length} holds more than the {most} different words there are for task "
                "'cwe': give RulerData(english_words=Path(...)) with the path of a longer list"
            )
        return size

    def draft(self, size: int) -> Draft:
        long = self.job.long
        example = self._list(40, 10, 3) if long else self._list(20, 3, 1)
        question = self._list(size, 30, 3) if long else self._list(size, 6, 1)
        answer = _numbered(example.outputs)
        return replace(question, context=f"{example.prompt} {answer}\n{question.context}")

    def _list(self, count: int, common_repeats: int, other_repeats: int) -> Draft:
        words = self._words if count <= len(self._words) else self._more
        sample = self.draws.python.sample(words, count)
        repeats = sample[:10] * common_repeats + sample[10:] * other_repeats
        self.draws.shuffle(repeats)
        return self.template.fill(_numbered(repeats), tuple(sample[:10]))


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


class CodedText(Prompts):
    """``fwe``: coded words whose frequencies follow Zipf's law; each sample has words of its own.

    The text grows in steps of a 32nd of the length, so samples may fall short of it by as much in
    words.
    """

    # The rarest word that is asked for, the fourth, occurs in texts of at least this size.
    smallest = math.ceil(_ZETA * 4**2)

    def __init__(self, job: Job) -> None:
        self._room = job.length - job.task.max_new_tokens
        super().__init__(job, "fwe", max(self._room // 32, 0))

    def begin(self, index: int) -> None:
        """Draw words by rank; the most frequent is "...", which does not count."""
        words: set[str] = set()
        while len(words) < max(self._room // 50, 4):
            words.add(self.draws.text(string.ascii_lowercase, 6))
        ranks = sorted(words)
        self.draws.shuffle(ranks)
        self._words = ["...", *ranks[1:]]

    def size(self) -> int:
        size, step = max(self._room // 6, 0), self.increment
        tokens = self.tokens(size)
        while tokens < self._room and step > 0:
            size += step
            before, tokens = tokens, self.tokens(size)
            if tokens <= before:
                raise ValueError(
                    f"tokenizer counts {tokens} tokens though the text grew by {step} words: turn "
                    "its truncation off"
                )
        return max(size - step, self.smallest)

    def draft(self, size: int) -> Draft:
        """About ``size`` words, the k-th of the vocabulary ``size / k² / zeta(2)`` times."""
        counts = size * np.arange(1, len(self._words) + 1) ** -2.0 / _ZETA
        text = np.repeat(self._words, counts.astype(int)).tolist()
        self.draws.shuffle(text)
        return self.template.fill(" ".join(text), tuple(self._words[1:4]))


class Documents(Prompts):
    """``qa_*``: sample i asks question i about one of many documents.

    The number of documents is fitted to question 0. ValueError for more samples than questions.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job, "qa", 10)
        self._questions, self._documents = texts.read_questions(job.data, job.task)
        if job.samples > len(self._questions):
            raise ValueError(
                f"samples={job.samples} for task {job.task.name!r}, but data.{job.task.data} has "
                f"{len(self._questions)} questions: ask for at most that many"
            )

    def draft(self, size: int) -> Draft:
        """At least the gold documents; all in order, over and over, where ``size`` needs them."""
        count, question = len(self._documents), self._questions[self.index]
        indices = self._some(size) if size < count else [i % count for i in range(size)]
        self.draws.shuffle(indices)
        documents = (f"Document {i}:\n{self._documents[j]}" for i, j in enumerate(indices, start=1))
        return self.template.fill("\n\n".join(documents), question.outputs, query=question.query)

    def _some(self, size: int) -> list[int]:
        """Gold documents, then some of the same article, then, if these run out, random others."""
        question, sample = self._questions[self.index], self.draws.python.sample
        gold, related = question.gold, question.related
        missing = size - len(gold)
        if missing <= len(related):
            return gold + sample(related, max(missing, 0))
        near = {*gold, *related}
        others = [i for i in range(len(self._documents)) if i not in near]
        return gold + related + sample(others, missing - len(related))


# The beginning of a task's name tells its family.
_FAMILIES: dict[str, Callable[[Job], Prompts]] = {
    "niah": Needles,
    "vt": Chains,
    "cwe": CommonWords,
    "fwe": CodedText,
    "qa": Documents,
}


def generate(
    task: str,
    encode: Callable[[str], Sized],
    length: int,
    samples: int,
    seed: int = 42,
    data: RulerData = _NO_DATA,
    chat: Chat = ("", ""),
) -> list[Sample]:
    """The first ``samples`` samples of a RULER task at ``length`` tokens, answers included.

    Draws the same random numbers in the same order as RULER's scripts do, so the same arguments
    and texts give RULER's samples, letter for letter; on essays where NLTK is installed with its
    data. We depart from RULER where it never ends or fails, which the classes of the tasks note.

    Args:
        task: name in ``TASKS``.
        encode: makes the tokens of a text. RULER doesn't count special tokens.
        length: most tokens that prompt and answer may have; RULER takes powers of two from 4096.
        samples: how many, from 1; RULER takes 500.
        seed: of all random numbers; RULER takes 42.
        data: where the texts of the tasks are.
        chat: what stands before and after the prompt.

    Raises:
        ValueError: a length that no sample fits into, with one that would do; texts that are
            missing, too few or of another format; a text without tokens.
        FileNotFoundError: no file at a path of ``data``.
        ModuleNotFoundError: wonderwords is not installed.
    """
    job = Job(TASKS[task], encode, length, samples, Draws(seed), data, chat)
    prompts = _FAMILIES[task.partition("_")[0]](job)
    size = prompts.size()
    return [prompts.sample(index, size) for index in range(samples)]
