"""Texts that prompts are made of: words to draw from, sentences of essays, files of the user's.

The words are the lists of the package wonderwords, as RULER reads them. RULER splits essays by
NLTK's punkt, and so do we where NLTK and its data are installed; nothing is downloaded. Elsewhere
a splitter of ours puts needles at slightly different places of the same text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

from hf_kvret.lab.evaluate.ruler.task import RulerTask


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


def single_words() -> list[str]:
    """All nouns, adjectives and verbs, sorted, without repetitions (8,166 in wonderwords 3.0.1)."""
    return sorted({*_word_list("noun"), *_word_list("adjective"), *_word_list("verb")})


def adjective_noun_pairs() -> Pairs:
    """All six million "adjective-noun" pairs, sorted, without repetitions."""
    return Pairs(_word_list("adjective"), _word_list("noun"))


class Pairs:
    """``sorted({f"{first}-{second}" ...})``, whose entries are made on demand.

    Entries with the same first word are neighbours and sorted by the second, with one exception:
    if a first word and a hyphen begin another first word ("blue", "blue-eyed"), their entries mix.
    Such families are made in full, the others are computed from the index.
    """

    def __init__(self, firsts: Iterable[str], seconds: Iterable[str]) -> None:
        endings = sorted(set(seconds))
        families: list[list[str]] = []
        for stem in sorted({f"{first}-" for first in firsts}):
            if families and stem.startswith(families[-1][0]):
                families[-1].append(stem)
            else:
                families.append([stem])
        # Each block has the text that begins all of its entries, and what follows it.
        self._blocks = [
            (family[0], endings)
            if len(family) == 1
            else ("", sorted({stem + ending for stem in family for ending in endings}))
            for family in families
        ]
        self._ends = list(accumulate(len(block) for _, block in self._blocks))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside {len(self)} pairs")
        number = bisect_right(self._ends, index)
        stem, block = self._blocks[number]
        # The difference is negative, so it counts from the block's end.
        return stem + block[index - self._ends[number]]


# An end mark, what closes behind it, and blanks before something that can begin a sentence.
_END = re.compile(r"""[.!?]+["'”’)\]]*(\s+)(?=["'“‘(\[]*[A-Z0-9])""")

# Words that a dot follows inside a sentence. Capitals are initials, but for "I".
_ABBREVIATION = re.compile(
    r"[A-HJ-Z]|(?i:al|approx|capt|cf|co|col|dr|e\.g|etc|fig|gen|gov|hon|i\.e|inc|jr|ltd?|messrs|"
    r"mrs?|ms|no|pp?|prof|rev|sen|sgt|sr|st|viz|vol|vs)"
)


def split_simply(text: str) -> list[str]:
    """The sentences of an English text, without the blanks between them.

    A sentence ends at a dot, question or exclamation mark that blanks and a capital or a digit
    follow; abbreviations such as "Dr." and initials don't end one. An empty text has none.
    """
    sentences = []
    start = 0
    for match in _END.finditer(text):
        # The last 40 characters hold the last word; a copy of all before it would cost n squared.
        before = text[max(start, match.start() - 40) : match.start()]
        word = re.split("[ \n]", before)[-1].lstrip("\"'“‘([")
        if match.group().rstrip() == "." and _ABBREVIATION.fullmatch(word):
            continue
        sentences.append(text[start : match.start(1)])
        start = match.end()
    return [*sentences, text[start:]] if start < len(text) else sentences


def best_splitter() -> Callable[[str], list[str]]:
    """NLTK's punkt if it is installed with its data, else :func:`split_simply`."""
    try:
        import nltk

        nltk.tokenize.sent_tokenize("Is it here? It is.")
    except (ModuleNotFoundError, LookupError):
        return split_simply
    return cast(Callable[[str], list[str]], nltk.tokenize.sent_tokenize)


@dataclass(frozen=True)
class RulerData:
    """Paths of the texts of the tasks, in the formats of ``FORMATS``.

    Attributes:
        essays: haystack of five ``niah_*`` tasks; RULER takes Paul Graham's.
        squad, hotpot: questions and documents of ``qa_1`` and ``qa_2``.
        english_words: more words for ``cwe``, which runs out of wonderwords' at about 128K tokens.
    """

    essays: Path | None = None
    squad: Path | None = None
    hotpot: Path | None = None
    english_words: Path | None = None


FORMATS = {
    "essays": "essays: a .txt, or JSON with a list or an object of texts, such as RULER's "
    'PaulGrahamEssays.json {"text": ...}',
    "squad": "SQuAD in its JSON format, such as dev-v2.0.json, or XQuAD's xquad.en.json",
    "hotpot": "HotpotQA in its JSON format, such as hotpot_dev_distractor_v1.json",
    "english_words": "words: a .txt with one on each line, or JSON with a list or an object of "
    "words, such as RULER's english_words.json",
}


class _File:
    """The file of an option of :class:`RulerData`, which a task needs.

    Its methods raise FileNotFoundError where no file is, and ValueError where no path is given, or
    for a file of another format or without content.
    """

    def __init__(self, data: RulerData, option: str, task: str) -> None:
        self._option, self._task = option, task
        self._path: Path | None = getattr(data, option)
        self._formats = FORMATS[option]

    def wrong(self, problem: str) -> ValueError:
        """The error that the file has a problem, with what to give."""
        return ValueError(f"data.{self._option}={self._path} {problem}: give {self._formats}")

    def text(self) -> str:
        """All of it."""
        if self._path is None:
            raise ValueError(
                f"task {self._task!r} needs data.{self._option}: give RulerData({self._option}="
                f"Path(...)) with the path of {self._formats}"
            )
        if not self._path.is_file():
            raise FileNotFoundError(
                f"data.{self._option}={self._path} is not a file: give {self._formats}"
            )
        try:
            return self._path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"is not UTF-8 text ({error})") from error

    def json(self) -> Any:
        """Its content as JSON."""
        try:
            return json.loads(self.text())
        except (json.JSONDecodeError, RecursionError) as error:
            raise self.wrong(f"is not JSON ({error})") from error

    def texts(self) -> list[str]:
        """All texts of a JSON list or object; the lines of any other file."""
        if self._path is None or self._path.suffix.lower() != ".json":
            return self.text().split("\n")
        content = self.json()
        values = list(content.values()) if isinstance(content, dict) else content
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.wrong("holds something other than a list or an object of texts")
        return values


def read_essay_words(data: RulerData, task: str) -> list[str]:
    """All words of the essays in order, split at white space; errors as of ``_File``.

    As in RULER, white space at the very beginning or end leaves an empty word there.
    """
    file = _File(data, "essays", task)
    text = re.sub(r"\s+", " ", "\n".join(file.texts()))
    if not text.strip():
        raise file.wrong("has no words")
    return text.split(" ")


def read_english_words(data: RulerData, task: str) -> list[str]:
    """The words of ``data.english_words`` in the file's order; none where no path is given."""
    if data.english_words is None:
        return []
    words = [text.strip() for text in _File(data, "english_words", task).texts()]
    return [word for word in words if word]


class Question(NamedTuple):
    """A question, its right answers, and indices of documents.

    The ``gold`` ones must be in the context, the ``related`` ones are of the same article.
    """

    query: str
    outputs: tuple[str, ...]
    gold: list[int]
    related: list[int]


# Gold documents, related ones, and the questions about them with their answers.
_Passage = tuple[list[str], list[str], list[tuple[str, tuple[str, ...]]]]


def _squad(content: Any) -> Iterator[_Passage]:
    """Answerable questions of SQuAD v1.1, v2.0 or XQuAD, and all paragraphs."""
    for article in content["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph, text in zip(article["paragraphs"], texts, strict=True):
            items = [item for item in paragraph["qas"] if not item.get("is_impossible", False)]
            questions = [
                (item["question"], tuple(answer["text"] for answer in item["answers"]))
                for item in items
            ]
            yield [text], [other for other in texts if other != text], questions


def _hotpot(content: Any) -> Iterator[_Passage]:
    """Questions of HotpotQA's distractor setting; a document is a title and its sentences.

    All ten paragraphs that the file gives with a question are its gold documents.
    """
    for item in content:
        gold = [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]
        yield gold, [], [(item["question"], (item["answer"],))]


_PARSERS = {"squad": ("SQuAD", _squad), "hotpot": ("HotpotQA", _hotpot)}


def read_questions(data: RulerData, task: RulerTask) -> tuple[list[Question], list[str]]:
    """Questions in the file's order, and all documents, sorted and without repetitions.

    Every question has text, an answer and a document. Errors are those of ``_File``.
    """
    assert task.data is not None
    file, (name, parse) = _File(data, task.data, task.name), _PARSERS[task.data]
    content = file.json()
    try:
        passages = list(parse(content))
        documents = sorted({text for gold, _, _ in passages for text in gold})
        number = {text: i for i, text in enumerate(documents)}
        questions = [
            Question(query, outputs, [number[x] for x in gold], [number[x] for x in related])
            for gold, related, items in passages
            for query, outputs in items
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise file.wrong(f"is not in {name}'s format ({error!r})") from error
    if not questions:
        raise file.wrong("has no answerable question")
    for i, (query, outputs, gold, _) in enumerate(questions):
        if not outputs or not all(isinstance(text, str) for text in (query, *outputs)):
            raise file.wrong(f"has no text for question or answers of question {i}")
        if not gold:
            raise file.wrong(f"has no documents for question {i}")
    return questions, documents
