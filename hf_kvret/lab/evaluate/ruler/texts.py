"""Texts that prompts are made of: words to draw from, sentences of essays, files of the user's.

The words are the lists of the package wonderwords, as RULER reads them. RULER splits essays by
NLTK's punkt, and so do we where NLTK and its data are installed; nothing is downloaded. Elsewhere
a splitter of ours puts needles at slightly different places of the same text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast


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
    """Paths of the texts of the tasks.

    Attributes:
        essays: haystack of five ``niah_*`` tasks: a .txt, or JSON with a list or an object of
            texts. RULER takes Paul Graham's.
        squad: questions and documents of ``qa_1``: SQuAD v1.1, v2.0 or XQuAD.
        hotpot: those of ``qa_2``: HotpotQA, distractor setting.
        english_words: more words for ``cwe``, which runs out of wonderwords' at about 128K
            tokens: JSON with a list or an object of words, or a .txt with a word on each line.
    """

    essays: Path | None = None
    squad: Path | None = None
    hotpot: Path | None = None
    english_words: Path | None = None


_FORMATS = {
    "essays": "essays: a .txt, or JSON with a list or an object of texts, such as RULER's "
    'PaulGrahamEssays.json {"text": ...}',
    "squad": "SQuAD in its JSON format, such as dev-v2.0.json, or XQuAD's xquad.en.json",
    "hotpot": "HotpotQA in its JSON format, such as hotpot_dev_distractor_v1.json",
    "english_words": "words: a .txt with one on each line, or JSON with a list or an object of "
    "words, such as RULER's english_words.json",
}


class Question(NamedTuple):
    """A question, its right answers, and indices of documents.

    The ``gold`` ones must be in the context, the ``related`` ones are of the same article.
    """

    query: str
    outputs: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


class QuestionSet(NamedTuple):
    """Questions in the file's order, and all documents, sorted and without repetitions."""

    questions: list[Question]
    documents: list[str]


def _wrong(data: RulerData, option: str, problem: str) -> ValueError:
    return ValueError(f"data.{option}={getattr(data, option)} {problem}: give {_FORMATS[option]}")


def _text(data: RulerData, option: str, task: str) -> str:
    path = getattr(data, option)
    if path is None:
        raise ValueError(
            f"task {task!r} needs data.{option}: give RulerData({option}=Path(...)) with the path "
            f"of {_FORMATS[option]}"
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"data.{option}={path} is not a file: give {_FORMATS[option]}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _wrong(data, option, f"is not UTF-8 text ({error})") from error


def _json(data: RulerData, option: str, task: str) -> Any:
    try:
        return json.loads(_text(data, option, task))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _wrong(data, option, f"is not JSON ({error})") from error


def _texts(data: RulerData, option: str, task: str) -> list[str]:
    """All texts of a JSON list or object; the lines of any other file."""
    if Path(getattr(data, option) or "").suffix.lower() != ".json":
        return _text(data, option, task).split("\n")
    content = _json(data, option, task)
    values = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _wrong(data, option, "holds something other than a list or an object of texts")
    return values


# The readers raise FileNotFoundError where no file is, ValueError where no path is given, or a
# file of another format or without content.


def read_essay_words(data: RulerData, task: str) -> list[str]:
    """All words of the essays in order, split at white space.

    As in RULER, white space at the very beginning or end leaves an empty word there.
    """
    text = re.sub(r"\s+", " ", "\n".join(_texts(data, "essays", task)))
    if not text.strip():
        raise _wrong(data, "essays", "has no words")
    return text.split(" ")


def read_english_words(data: RulerData, task: str) -> list[str]:
    """The words of ``data.english_words`` in the file's order; none where no path is given."""
    if data.english_words is None:
        return []
    words = [text.strip() for text in _texts(data, "english_words", task)]
    return [word for word in words if word]


def read_squad(data: RulerData, task: str) -> QuestionSet:
    """Answerable questions of SQuAD v1.1, v2.0 or XQuAD, and all paragraphs."""
    content = _json(data, "squad", task)
    try:
        articles = [article["paragraphs"] for article in content["data"]]
        documents = sorted({paragraph["context"] for article in articles for paragraph in article})
        number = {text: i for i, text in enumerate(documents)}
        questions = []
        for article in articles:
            indices = [number[paragraph["context"]] for paragraph in article]
            for paragraph, gold in zip(article, indices, strict=True):
                related = tuple(i for i in indices if i != gold)
                items = [one for one in paragraph["qas"] if not one.get("is_impossible", False)]
                for item in items:
                    outputs = tuple(answer["text"] for answer in item["answers"])
                    questions.append(Question(item["question"], outputs, (gold,), related))
    except (KeyError, TypeError, AttributeError) as error:
        raise _wrong(data, "squad", f"is not in SQuAD's format ({error!r})") from error
    return _question_set(data, "squad", questions, documents)


def read_hotpot(data: RulerData, task: str) -> QuestionSet:
    """Questions of HotpotQA's distractor setting; a document is a title and its sentences.

    All ten paragraphs that the file gives with a question are its gold documents.
    """
    content = _json(data, "hotpot", task)
    try:
        contexts = [
            [f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]]
            for item in content
        ]
        documents = sorted({text for texts in contexts for text in texts})
        number = {text: i for i, text in enumerate(documents)}
        questions = [
            Question(item["question"], (item["answer"],), tuple(number[text] for text in texts))
            for item, texts in zip(content, contexts, strict=True)
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _wrong(data, "hotpot", f"is not in HotpotQA's format ({error!r})") from error
    return _question_set(data, "hotpot", questions, documents)


def _question_set(
    data: RulerData, option: str, questions: list[Question], documents: list[str]
) -> QuestionSet:
    """The set, once every question is known to have text, an answer and a document."""
    if not questions:
        raise _wrong(data, option, "has no answerable question")
    for i, (query, outputs, gold, _) in enumerate(questions):
        if not outputs or not all(isinstance(text, str) for text in (query, *outputs)):
            raise _wrong(data, option, f"has no text for question or answers of question {i}")
        if not gold:
            raise _wrong(data, option, f"has no documents for question {i}")
    return QuestionSet(questions, documents)
