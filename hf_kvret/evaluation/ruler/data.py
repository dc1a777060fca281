"""Texts that the user gives by path: essays, SQuAD, HotpotQA, a list of English words.

RULER downloads Paul Graham's essays, ``dev-v2.0.json`` of SQuAD and
``hotpot_dev_distractor_v1.json`` of HotpotQA. Files of the same formats work too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WHAT = {
    "essays": "essays: a .txt, or JSON with a list or an object of texts, such as RULER's "
    'PaulGrahamEssays.json {"text": ...}',
    "squad": "SQuAD in its JSON format, such as dev-v2.0.json, or XQuAD's xquad.en.json",
    "hotpot": "HotpotQA in its JSON format, such as hotpot_dev_distractor_v1.json",
    "english_words": "words: a .txt with one on each line, or JSON with a list or an object of "
    "words, such as RULER's english_words.json",
}


@dataclass(frozen=True)
class RulerData:
    """Where the texts of the tasks are.

    Attributes:
        essays: haystack of ``niah_single_2``, ``niah_single_3``, ``niah_multikey_1``,
            ``niah_multivalue`` and ``niah_multiquery``. A .txt, or JSON with a list or an object
            of texts.
        squad: questions and documents of ``qa_1``: SQuAD v1.1, v2.0 or XQuAD.
        hotpot: those of ``qa_2``: HotpotQA, distractor setting.
        english_words: more words for ``cwe``, which runs out of wonderwords' 8,166 at about 128K
            tokens. RULER's ``english_words.json``, any JSON list or object of words, or a .txt
            with a word on each line.
    """

    essays: Path | None = None
    squad: Path | None = None
    hotpot: Path | None = None
    english_words: Path | None = None


@dataclass(frozen=True)
class Question:
    """A question about some of the documents of a :class:`QuestionSet`.

    Attributes:
        query: the question.
        outputs: right answers.
        gold: indices of the documents that must be in the context.
        related: indices of other documents of the same article.
    """

    query: str
    outputs: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """Questions in the file's order, and all documents, sorted and without repetitions."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


def _text(data: RulerData, option: str, task: str) -> str:
    path = getattr(data, option)
    if path is None:
        raise ValueError(
            f"task {task!r} needs data.{option}: give RulerData({option}=Path(...)) with the path "
            f"of {_WHAT[option]}"
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"data.{option}={path} is not a file: give {_WHAT[option]}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.{option}={path} is not UTF-8 text ({error})") from error


def _json(data: RulerData, option: str, task: str) -> Any:
    text = _text(data, option, task)
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"data.{option}={getattr(data, option)} is not JSON ({error}): give {_WHAT[option]}"
        ) from error


def _wrong(data: RulerData, option: str, problem: str) -> ValueError:
    return ValueError(f"data.{option}={getattr(data, option)} {problem}: give {_WHAT[option]}")


def _texts(data: RulerData, option: str, task: str) -> list[str]:
    """All texts of a JSON list or object; one text of any other file."""
    if Path(getattr(data, option) or "").suffix.lower() != ".json":
        return [_text(data, option, task)]
    content = _json(data, option, task)
    values = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _wrong(data, option, "holds something other than a list or an object of texts")
    return values


def read_essay_words(data: RulerData, task: str) -> list[str]:
    """All words of the essays in order, split at white space.

    As in RULER, white space at the very beginning or end leaves an empty word there.

    Raises:
        ValueError: no path, not a file of texts, or no words.
        FileNotFoundError: no such file.
    """
    text = re.sub(r"\s+", " ", "\n".join(_texts(data, "essays", task)))
    if not text.strip():
        raise _wrong(data, "essays", "has no words")
    return text.split(" ")


def read_english_words(data: RulerData, task: str) -> list[str] | None:
    """The words of ``data.english_words`` in the file's order; None where no path is given.

    Raises:
        ValueError: not a file of words.
        FileNotFoundError: no such file.
    """
    if data.english_words is None:
        return None
    texts = _texts(data, "english_words", task)
    if Path(data.english_words).suffix.lower() != ".json":
        texts = texts[0].split("\n")
    return [word.strip() for word in texts if word.strip()]


def read_squad(data: RulerData, task: str) -> QuestionSet:
    """Answerable questions of SQuAD v1.1, v2.0 or XQuAD, and all paragraphs.

    Raises:
        ValueError: no path, not SQuAD's format, or no answerable question.
        FileNotFoundError: no such file.
    """
    content = _json(data, "squad", task)
    try:
        articles = [article["paragraphs"] for article in content["data"]]
        documents = sorted({paragraph["context"] for article in articles for paragraph in article})
        number = {text: i for i, text in enumerate(documents)}
        questions = []
        for article in articles:
            of_article = [number[paragraph["context"]] for paragraph in article]
            for paragraph, gold in zip(article, of_article, strict=True):
                related = tuple(i for i in of_article if i != gold)
                questions += [
                    Question(
                        item["question"],
                        tuple(answer["text"] for answer in item["answers"]),
                        (gold,),
                        related,
                    )
                    for item in paragraph["qas"]
                    if not item.get("is_impossible", False)
                ]
    except (KeyError, TypeError, AttributeError) as error:
        raise _wrong(data, "squad", f"is not in SQuAD's format ({error!r})") from error
    return _checked(data, "squad", questions, documents)


def read_hotpot(data: RulerData, task: str) -> QuestionSet:
    """Questions of HotpotQA's distractor setting; a document is a title and its sentences.

    All ten paragraphs that the file gives with a question are its gold documents.

    Raises:
        ValueError: no path, not HotpotQA's format, or no question.
        FileNotFoundError: no such file.
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
    return _checked(data, "hotpot", questions, documents)


def _checked(
    data: RulerData, option: str, questions: list[Question], documents: list[str]
) -> QuestionSet:
    """The set, once every question is known to have text, an answer and a document."""
    if not questions:
        raise _wrong(data, option, "has no answerable question")
    for i, question in enumerate(questions):
        texts = (question.query, *question.outputs)
        if not question.outputs or not all(isinstance(text, str) for text in texts):
            raise _wrong(data, option, f"has no text for question or answers of question {i}")
        if not question.gold:
            raise _wrong(data, option, f"has no documents for question {i}")
    return QuestionSet(tuple(questions), tuple(documents))
