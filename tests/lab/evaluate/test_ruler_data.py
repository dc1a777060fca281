"""Files that users give: each format is read, and a wrong file is told by its option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.ruler import TASKS, RulerData, generate
from hf_kvret.lab.evaluate.ruler.texts import (
    read_english_words,
    read_essay_words,
    read_hotpot,
    read_squad,
)


def put(path: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("essays.json", {"text": "One  two\nthree."}),
        ("essays.json", ["One two", "three."]),
        ("essays.json", {"first": "One two", "second": "three."}),
        ("essays.txt", "One two\t three."),
        ("essays", "One two three."),
    ],
)
def test_essays_are_words_in_order_in_every_format(
    tmp_path: Path, name: str, content: object
) -> None:
    data = RulerData(essays=put(tmp_path / name, content))
    assert read_essay_words(data, "niah_single_2") == ["One", "two", "three."]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("words.json", {"0": "apple", "1": "pear"}),
        ("words.json", ["apple", "pear"]),
        ("words.txt", "apple\r\n\npear\n"),
    ],
)
def test_english_words_are_read_in_every_format(tmp_path: Path, name: str, content: object) -> None:
    data = RulerData(english_words=put(tmp_path / name, content))
    assert read_english_words(data, "cwe") == ["apple", "pear"]
    assert read_english_words(RulerData(), "cwe") == []


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "Zebra text.",
                    "qas": [
                        {"question": "Q0?", "answers": [{"text": "a"}, {"text": "b"}]},
                        {"question": "Q1?", "answers": [], "is_impossible": True},
                    ],
                },
                {
                    "context": "Apple text.",
                    "qas": [
                        {"question": "Q2?", "answers": [{"text": "c"}], "is_impossible": False}
                    ],
                },
            ]
        },
        {"paragraphs": [{"context": "Melon text.", "qas": []}]},
    ]
}


def test_squad_keeps_answerable_questions_and_all_paragraphs(tmp_path: Path) -> None:
    questions = read_squad(RulerData(squad=put(tmp_path / "s.json", SQUAD)), "qa_1")
    assert questions.documents == ["Apple text.", "Melon text.", "Zebra text."]
    assert [item.query for item in questions.questions] == ["Q0?", "Q2?"]
    assert questions.questions[0].outputs == ("a", "b")
    assert [item.gold for item in questions.questions] == [(2,), (0,)]
    assert [item.related for item in questions.questions] == [(0,), (2,)]


HOTPOT = [
    {"question": "Q0?", "answer": "a", "context": [["B", ["x.", " y."]], ["A", ["z."]]]},
    {"question": "Q1?", "answer": "b", "context": [["A", ["z."]]]},
]


def test_hotpot_documents_are_title_and_sentences_once_each(tmp_path: Path) -> None:
    questions = read_hotpot(RulerData(hotpot=put(tmp_path / "h.json", HOTPOT)), "qa_2")
    assert questions.documents == ["A\nz.", "B\nx. y."]
    assert [item.gold for item in questions.questions] == [(1, 0), (0,)]
    assert [item.outputs for item in questions.questions] == [("a",), ("b",)]


@pytest.mark.parametrize("task", [task for task in TASKS.values() if task.data])
def test_a_task_without_its_texts_names_the_option(task: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"'{task.name}' needs data\.{task.data}: give RulerData"):
        generate(task.name, str.split, 4096, 1)
    missing = RulerData(**{task.data: tmp_path / "not_here.json"})
    with pytest.raises(FileNotFoundError, match=rf"data\.{task.data}=.*not_here\.json"):
        generate(task.name, str.split, 4096, 1, data=missing)
    with pytest.raises(FileNotFoundError, match="is not a file"):
        generate(task.name, str.split, 4096, 1, data=RulerData(**{task.data: tmp_path}))
    broken = RulerData(**{task.data: put(tmp_path / "broken.json", '{"text": ')})
    with pytest.raises(ValueError, match=rf"data\.{task.data}=.*broken\.json is not JSON"):
        generate(task.name, str.split, 4096, 1, data=broken)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=rf"data\.{task.data}=.*is not UTF-8"):
        generate(task.name, str.split, 4096, 1, data=RulerData(**{task.data: binary}))


@pytest.mark.parametrize(
    ("option", "content", "problem"),
    [
        ("essays", {"text": 3}, "something other than a list or an object of texts"),
        ("essays", 3, "something other than"),
        ("essays", [" ", "\n"], "has no words"),
        ("english_words", [1, 2], "something other than"),
        ("squad", {"dta": []}, r"SQuAD's format \(KeyError\('data'\)\)"),
        ("squad", [1], "SQuAD's format"),
        ("squad", {"data": [{"paragraphs": [{"context": "x", "qas": ["q"]}]}]}, "SQuAD's format"),
        ("squad", {"data": [{"paragraphs": [{"context": "x", "qas": []}]}]}, "no answerable"),
        (
            "squad",
            {
                "data": [
                    {"paragraphs": [{"context": "x", "qas": [{"question": "q", "answers": []}]}]}
                ]
            },
            "no text for question or answers of question 0",
        ),
        ("hotpot", [{"question": "q", "answer": "a"}], r"HotpotQA's format \(KeyError\('context'"),
        ("hotpot", {"data": []}, "HotpotQA's format"),
        ("hotpot", [{"question": "q", "answer": "a", "context": [["t"]]}], "HotpotQA's format"),
        (
            "hotpot",
            [{"question": "q", "answer": "a", "context": []}],
            "no documents for question 0",
        ),
        ("hotpot", [{"question": "q", "answer": 4, "context": [["t", ["s"]]]}], "no text"),
        ("hotpot", [], "no answerable question"),
    ],
)
def test_files_of_another_format_are_refused_with_what_to_give(
    tmp_path: Path, option: str, content: object, problem: str
) -> None:
    task = {"essays": "niah_single_2", "english_words": "cwe", "squad": "qa_1", "hotpot": "qa_2"}
    data = RulerData(**{option: put(tmp_path / "wrong.json", content)})
    with pytest.raises(ValueError, match=problem) as caught:
        generate(task[option], str.split, 4096, 1, data=data)
    assert f"data.{option}={tmp_path / 'wrong.json'}" in str(caught.value)
    assert ": give " in str(caught.value)


def test_paths_may_be_texts(tmp_path: Path) -> None:
    path = put(tmp_path / "essays.txt", "One two three.")
    data = RulerData(essays=str(path))  # type: ignore[arg-type]
    assert read_essay_words(data, "niah_single_2") == ["One", "two", "three."]
