"""RULER's tasks and prompts: needles, chains, lists and documents (arXiv 2404.06654, section 3).

Names, lengths of answers and scores are those of ``scripts/synthetic.yaml``,
``scripts/data/synthetic/constants.py`` and ``scripts/eval`` in NVIDIA/RULER (Apache-2.0), and so
are templates. Random numbers are others, so prompts are not the same. There is a class for each
family of tasks, whose haystacks have a size in units of the task: lines, sentences, different
words, documents.
"""

from __future__ import annotations

import json
import math
import random
import re
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from hf_kvret.lab.evaluate.texts import read_text

TEMPLATES: dict[str, Any] = json.loads(Path(__file__).with_name("templates.json").read_bytes())
"""A family's text and answer prefix, a needle, and a line of noise; placeholders in braces."""

NOISE: str = TEMPLATES["noise"]
"""The one line of the noise haystack, of ``niah_single_1`` and ``vt``."""

# Blanks behind a sentence.
_GAP = re.compile(r"(?<=[.!?]) |(?<=[.!?][\"'”’)\]]) ")
# Parts of an essay that needles may stand between.
_DEPTHS = 39
# Variables in a chain: the first and four hops.
_VARIABLES = 5
_EXAMPLE_LINES = 5
_COMMON = 10
_ZETA = math.pi**2 / 6  # the zeta function at 2
# Sizes are fitted up to so many parts of them.
_STEPS = 50

Symbols = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class RulerTask:
    """One task.

    Attributes:
        name: key in :data:`TASKS`.
        max_new_tokens: tokens that an answer may have; they count towards a sample's length.
        metric: ``all`` counts the share of the references that are in the answer, ``part``
            whether any is.
        data: the file that the task needs; None where it makes up its text.
        haystack: what hides the needles of ``niah_*`` without essays: noise, or other needles.
        key, value: what keys and values of needles look like.
        keys, values: how many keys there are, how many values each has, one needle for each.
        queries: how many of the keys are asked for.
    """

    name: str
    max_new_tokens: int
    metric: Literal["all", "part"] = "all"
    data: Literal["essays", "squad", "hotpot"] | None = None
    haystack: Literal["noise", "needles"] = "noise"
    key: Symbols = "words"
    value: Symbols = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


TASKS: dict[str, RulerTask] = {
    task.name: task
    for task in (
        RulerTask("niah_single_1", 128),
        RulerTask("niah_single_2", 128, data="essays"),
        RulerTask("niah_single_3", 128, data="essays", value="uuids"),
        RulerTask("niah_multikey_1", 128, data="essays", keys=4),
        RulerTask("niah_multikey_2", 128, haystack="needles"),
        RulerTask("niah_multikey_3", 128, haystack="needles", key="uuids", value="uuids"),
        RulerTask("niah_multivalue", 128, data="essays", values=4),
        # As many keys as are asked for, as RULER makes it.
        RulerTask("niah_multiquery", 128, data="essays", keys=4, queries=4),
        RulerTask("vt", 30),
        RulerTask("cwe", 120),
        RulerTask("fwe", 50),
        RulerTask("qa_1", 32, metric="part", data="squad"),
        RulerTask("qa_2", 32, metric="part", data="hotpot"),
    )
}
"""All tasks by name, in the order of RULER's tables."""


@dataclass(frozen=True)
class Sample:
    """One prompt, in the parts that a model may be given apart, and its right answers.

    Attributes:
        context: instruction, one-shot example and haystack. It can be read before the question is
            known.
        question: the text behind the haystack.
        answer_prefix: beginning of the answer that is put into the model's mouth.
        outputs: references; the task's metric says how they count.
    """

    context: str
    question: str
    answer_prefix: str
    outputs: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """All that the model is given."""
        return self.context + self.question + self.answer_prefix


def sample_score(task: str, prediction: str, references: Sequence[str]) -> float:
    """Score of one answer, 0 to 1: references count where they are substrings, case aside.

    In the answer each control character 0x00-0x1f is a newline first, and the ends are stripped.
    """
    text = re.sub(r"[\x00-\x1f]", "\n", prediction).strip().lower()
    scores = [float(reference.lower() in text) for reference in references]
    return max(scores) if TASKS[task].metric == "part" else sum(scores) / len(scores)


def filled(template: str, context: str, outputs: tuple[str, ...], **fields: object) -> Sample:
    """The prompt of a template around a haystack."""
    text, answer_prefix = TEMPLATES[template]
    head, _, tail = text.partition("{context}")
    head, tail, prefix = (part.format(**fields) for part in (head, tail, answer_prefix))
    return Sample(head + context, tail, prefix, outputs)


def single_words() -> list[str]:
    """All nouns, adjectives and verbs, sorted, without repetitions (8,166 in wonderwords 3.0.1)."""
    return sorted({*_word_list("noun"), *_word_list("adjective"), *_word_list("verb")})


def adjective_noun_pairs() -> Pairs:
    """All six million "adjective-noun" pairs."""
    return Pairs(_word_list("adjective"), _word_list("noun"))


class Pairs:
    """Every ``f"{first}-{second}"``, by first and then by second word; made on demand."""

    def __init__(self, firsts: Iterable[str], seconds: Iterable[str]) -> None:
        self._firsts = sorted({f"{first}-" for first in firsts})
        self._seconds = sorted(set(seconds))

    def __len__(self) -> int:
        return len(self._firsts) * len(self._seconds)

    def __getitem__(self, index: int) -> str:
        first, second = divmod(index, len(self._seconds))
        return self._firsts[first] + self._seconds[second]


def _word_list(name: str) -> list[str]:
    """The words of one list, in the file's order and with its repetitions."""
    try:
        import wonderwords  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "RULER draws its words from the lists of wonderwords, which is not installed: "
            "pip install wonderwords, or in the checkout pip install -c constraints.txt '.[eval]'",
            name=error.name,
        ) from error
    text = files("wonderwords.assets").joinpath(f"{name}list.txt").read_text(encoding="utf-8")
    return [line.rstrip() for line in text.splitlines()]


class Prompts(ABC):
    """Draws the prompts of a task.

    Args:
        task: one of ``TASKS``.
        length: tokens that a prompt may have, with its answer.
        data: the file of the task's texts, where it needs one.
    """

    smallest, most = 1, 1 << 30
    """Units of the smallest and the largest haystack."""

    def __init__(self, task: RulerTask, length: int, data: Path | None) -> None:
        self.task, self.length = task, length

    @abstractmethod
    def draw(self, rng: random.Random, index: int, size: int) -> Sample:
        """The sample of number ``index`` with a haystack of ``size`` units."""


class Needles(Prompts):
    """``niah_*``: sentences that give the values of keys, hidden in noise, essays or each other."""

    def __init__(self, task: RulerTask, length: int, data: Path | None) -> None:
        super().__init__(task, length, data)
        pairs = adjective_noun_pairs()
        self._symbols: dict[Symbols, Callable[[random.Random], str]] = {
            "words": lambda rng: rng.choice(pairs),
            "numbers": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
            "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
        }
        self._sentences: list[str] = []
        self.smallest = task.keys * task.values
        if data is not None:
            self._sentences = _GAP.split(" ".join(read_text(data).split()))

    def draw(self, rng: random.Random, index: int, size: int) -> Sample:
        task = self.task
        keys, values = self._symbols[task.key], self._symbols[task.value]
        facts = [(keys(rng), [values(rng) for _ in range(task.values)]) for _ in range(task.keys)]
        needles = [self._needle(key, value) for key, values in facts for value in values]
        rng.shuffle(needles)
        if self._sentences:
            lines = [self._sentences[i % len(self._sentences)] for i in range(size)]
            depths = rng.sample(range(_DEPTHS + 1), len(needles))
            places = [size * depth // _DEPTHS for depth in depths]
        else:
            lines = [NOISE] * size
            if task.haystack == "needles":
                lines = [self._needle(keys(rng), values(rng)) for _ in range(size)]
            places = rng.sample(range(size), len(needles))
        for place, needle in zip(sorted(places, reverse=True), needles, strict=True):
            lines.insert(place, needle)
        asked = rng.sample(facts, task.queries)
        *others, last = [key for key, _ in asked]
        outputs = tuple(value for _, values in asked for value in values)
        # Where one value is asked for the template is in the singular, the needles are not.
        one = len(outputs) == 1
        return filled(
            "niah_one" if one else "niah",
            (" " if self._sentences else "\n").join(lines),
            outputs,
            type_v=task.value[:-1] if one else task.value,
            # "a", or "a, b, and c".
            query=f"{', '.join(others)}, and {last}" if others else last,
        )

    def _needle(self, key: str, value: str) -> str:
        return str(TEMPLATES["needle"]).format(type_v=self.task.value, key=key, value=value)


class Chains(Prompts):
    """``vt``: a chain of assignments, ``VAR B = VAR A``, in lines of noise.

    All variables that have the value of the first one are asked for. An example comes first.
    """

    smallest = _VARIABLES

    def draw(self, rng: random.Random, index: int, size: int) -> Sample:
        example, sample = self._chain(rng, _EXAMPLE_LINES, 3), self._chain(rng, size, 5)
        shown = f"{example.prompt} {' '.join(example.outputs)}\n\n"
        return replace(sample, context=shown + sample.context)

    def _chain(self, rng: random.Random, size: int, letters: int) -> Sample:
        names: dict[str, None] = {}
        while len(names) < _VARIABLES:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        value = str(rng.randint(10_000, 99_998))
        chain = [f"VAR {next(iter(names))} = {value}"]
        chain += [f"VAR {name} = VAR {previous}" for previous, name in pairwise(names)]
        lines = [NOISE] * size
        places = sorted(rng.sample(range(size), _VARIABLES))
        for added, (place, statement) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + added, statement)
        return filled("vt", "\n".join(lines), tuple(names), query=value, num_v=_VARIABLES)


class CommonWords(Prompts):
    """``cwe``: numbered words, of which ten are common; an example comes first.

    Below 4096 tokens the common words come 6 times and the others once, else 30 and 3 times. All
    words together fill about 128K tokens: prompts don't get longer.
    """

    smallest = _COMMON

    def __init__(self, task: RulerTask, length: int, data: Path | None) -> None:
        super().__init__(task, length, data)
        self._words = single_words()
        self.most = len(self._words)

    def draw(self, rng: random.Random, index: int, size: int) -> Sample:
        long = self.length >= 4096
        example = self._list(rng, 40, 10, 3) if long else self._list(rng, 20, 3, 1)
        sample = self._list(rng, size, 30, 3) if long else self._list(rng, size, 6, 1)
        answer = _numbered(list(example.outputs))
        return replace(sample, context=f"{example.prompt} {answer}\n{sample.context}")

    def _list(self, rng: random.Random, count: int, common: int, others: int) -> Sample:
        words = rng.sample(self._words, count)
        repeated = words[:_COMMON] * common + words[_COMMON:] * others
        rng.shuffle(repeated)
        return filled("cwe", _numbered(repeated), tuple(words[:_COMMON]))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


class CodedText(Prompts):
    """``fwe``: coded words whose frequencies follow Zipf's law; each sample has words of its own.

    A text of ``size`` words has the k-th of them ``size / k² / zeta(2)`` times. The most frequent
    one is "...", which does not count.
    """

    # The rarest word that is asked for, the fourth, occurs in texts of at least this size.
    smallest = math.ceil(_ZETA * 4**2)

    def draw(self, rng: random.Random, index: int, size: int) -> Sample:
        count, words = max(self.length // 50, 4), {"...": None}
        while len(words) < count:
            words["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        counts = size * np.arange(1, count + 1) ** -2.0 / _ZETA
        text = np.repeat(list(words), counts.astype(int)).tolist()
        rng.shuffle(text)
        return filled("fwe", " ".join(text), tuple(words)[1:4])


class Question(NamedTuple):
    """A question, its right answers, and documents.

    The ``gold`` ones must be in the context, the ``related`` ones are of the same article.
    """

    query: str
    outputs: tuple[str, ...]
    gold: list[str]
    related: list[str]


def read_questions(option: str, path: Path) -> tuple[list[Question], list[str]]:
    """Questions in the file's order, and all documents, sorted and without repetitions.

    Args:
        option: the file's format, ``"squad"`` (SQuAD v1.1, v2.0 or XQuAD) or ``"hotpot"``
            (HotpotQA's distractor setting).
        path: of the file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another format, or no question that can be answered.
    """
    parse, name = _PARSERS[option]
    try:
        questions, documents = parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--{option} {path} is not in {name}'s JSON format ({error!r}): give its own file"
        ) from error
    if not questions:
        raise ValueError(f"--{option} {path} has no answerable question: give {name}'s own file")
    return questions, sorted(documents)


def _squad(content: Any) -> tuple[list[Question], set[str]]:
    """Answerable questions of each paragraph, and the other paragraphs of its article."""
    questions, documents = list[Question](), set[str]()
    for article in content["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        documents.update(texts)
        for paragraph, text in zip(article["paragraphs"], texts, strict=True):
            related = [other for other in texts if other != text]
            for item in paragraph["qas"]:
                if not item.get("is_impossible", False):
                    outputs = tuple(answer["text"] for answer in item["answers"])
                    questions.append(Question(item["question"], outputs, [text], related))
    return questions, documents


def _hotpot(content: Any) -> tuple[list[Question], set[str]]:
    """Each question with the ten paragraphs that the file gives with it, all of them gold."""
    questions = []
    for item in content:
        gold = [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]
        questions.append(Question(item["question"], (item["answer"],), gold, []))
    return questions, {text for one in questions for text in one.gold}


_PARSERS = {"squad": (_squad, "SQuAD"), "hotpot": (_hotpot, "HotpotQA")}


class Documents(Prompts):
    """``qa_*``: sample i asks question i about one of many documents."""

    def __init__(self, task: RulerTask, length: int, data: Path | None) -> None:
        super().__init__(task, length, data)
        assert task.data is not None and data is not None
        self._questions, self._documents = read_questions(task.data, data)

    def draw(self, rng: random.Random, index: int, size: int) -> Sample:
        """At least the gold documents, then those of the same article, then others."""
        if index >= len(self._questions):
            raise ValueError(
                f"task {self.task.name!r} has {len(self._questions)} questions in its file: ask "
                "for at most as many samples"
            )
        question, count = self._questions[index], len(self._documents)
        ranked = [*question.gold, *rng.sample(question.related, len(question.related))]
        first = set(ranked)
        others = [text for text in self._documents if text not in first]
        ranked += rng.sample(others, len(others))
        # All of them over and over, where they don't fill the size.
        texts = [ranked[i % count] for i in range(max(size, len(question.gold)))]
        rng.shuffle(texts)
        shown = (f"Document {i}:\n{text}" for i, text in enumerate(texts, start=1))
        return filled("qa", "\n\n".join(shown), question.outputs, query=question.query)


# By the beginning of a task's name.
_FAMILIES: dict[str, type[Prompts]] = dict(
    niah=Needles, vt=Chains, cwe=CommonWords, fwe=CodedText, qa=Documents
)


def generate(
    task: str,
    encode: Callable[[str], Sized],
    length: int,
    samples: int,
    seed: int = 42,
    data: Path | None = None,
) -> list[Sample]:
    """The first ``samples`` samples of a RULER task at ``length`` tokens, answers included.

    Args:
        task: name in ``TASKS``.
        encode: makes the tokens of a text.
        length: most tokens that prompt and answer may have; RULER takes powers of two from 4096.
        samples: how many, from 1; RULER takes 500.
        seed: of all random numbers.
        data: the file that the task needs, if it does.

    Raises:
        ValueError: a length that no sample fits into, with one that would do; a file of another
            format, or with too few questions.
        FileNotFoundError: no such file.
        ModuleNotFoundError: wonderwords is not installed.
    """
    known = TASKS[task]
    prompts = _FAMILIES[task.partition("_")[0]](known, length, data)

    def draw(index: int, size: int) -> tuple[Sample, int]:
        """A sample, and its tokens with the answer's."""
        one = prompts.draw(random.Random(f"{seed} {task} {index}"), index, size)
        return one, len(encode(one.prompt)) + known.max_new_tokens

    size = _largest(lambda size: draw(0, size)[1] <= length, prompts.smallest, prompts.most)
    result = []
    for index in range(samples):
        own, (sample, total) = size, draw(index, size)
        while total > length and own > prompts.smallest:
            own = max(own - max(1, own // _STEPS), prompts.smallest)
            sample, total = draw(index, own)
        if total > length:
            raise ValueError(
                f"length={length} is too short for task {task!r}: with this tokenizer its smallest "
                f"sample takes {total} tokens, {known.max_new_tokens} of them for the answer; use "
                f"a length of at least {total}"
            )
        result.append(sample)
    return result


def _largest(fits: Callable[[int], bool], smallest: int, most: int) -> int:
    """The largest size that ``fits``, up to a 50th; from ``smallest``, and ``most`` at most."""
    low, high = smallest, 2 * smallest
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // _STEPS):
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= most and fits(middle) else (low, middle)
    return low
