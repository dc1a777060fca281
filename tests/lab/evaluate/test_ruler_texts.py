"""Texts of RULER: words, pairs, sentences, and files of each format; a wrong file is named."""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.ruler import TASKS, RulerData, generate
from hf_kvret.lab.evaluate.ruler.texts import (
    Pairs,
    adjective_noun_pairs,
    best_splitter,
    read_english_words,
    read_essay_words,
    read_questions,
    single_words,
    split_simply,
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
    data = RulerData(squad=put(tmp_path / "s.json", SQUAD))
    questions, documents = read_questions(data, TASKS["qa_1"])
    assert documents == ["Apple text.", "Melon text.", "Zebra text."]
    assert [item.query for item in questions] == ["Q0?", "Q2?"]
    assert questions[0].outputs == ("a", "b")
    assert [item.gold for item in questions] == [[2], [0]]
    assert [item.related for item in questions] == [[0], [2]]


HOTPOT = [
    {"question": "Q0?", "answer": "a", "context": [["B", ["x.", " y."]], ["A", ["z."]]]},
    {"question": "Q1?", "answer": "b", "context": [["A", ["z."]]]},
]


def test_hotpot_documents_are_title_and_sentences_once_each(tmp_path: Path) -> None:
    data = RulerData(hotpot=put(tmp_path / "h.json", HOTPOT))
    questions, documents = read_questions(data, TASKS["qa_2"])
    assert documents == ["A\nz.", "B\nx. y."]
    assert [item.gold for item in questions] == [[1, 0], [0]]
    assert [item.outputs for item in questions] == [("a",), ("b",)]


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


def brute_force(firsts: list[str], seconds: list[str]) -> list[str]:
    return sorted({f"{first}-{second}" for first in firsts for second in seconds})


@pytest.mark.parametrize(
    ("firsts", "seconds"),
    [
        (["red", "blue", "red"], ["cat", "ant", "cat"]),
        (["blue-eyed", "blue", "blu", "green"], ["zebra", "ape", "eyed-cat", "f"]),
        (["a", "a-b", "a-b-c", "ab", "a b"], ["x", "b-x", "b-c-x", "c"]),
        (["one"], ["two"]),
        (["Big", "big", "éa"], ["Ñu", "nu"]),
    ],
)
def test_pairs_are_the_sorted_set_of_all_pairs(firsts: list[str], seconds: list[str]) -> None:
    expected = brute_force(firsts, seconds)
    pairs = Pairs(firsts, seconds)
    assert len(pairs) == len(expected)
    assert list(pairs) == expected


def test_random_choice_draws_from_pairs_as_from_the_list() -> None:
    firsts, seconds = ["wide", "wide-eyed", "old"], [f"noun{i}" for i in range(37)]
    expected = brute_force(firsts, seconds)
    drawn, listed = random.Random(5), random.Random(5)
    pairs = Pairs(firsts, seconds)
    assert [drawn.choice(pairs) for _ in range(50)] == [listed.choice(expected) for _ in range(50)]


def test_positions_outside_are_refused() -> None:
    pairs = Pairs(["a"], ["x", "y"])
    for index in (2, -1):
        with pytest.raises(IndexError, match="outside 2 pairs"):
            pairs[index]
    assert len(Pairs([], ["x"])) == 0


def test_the_lists_are_those_of_wonderwords() -> None:
    words = single_words()
    assert words == sorted(set(words))
    # An adjective, a noun and a verb.
    assert {"happy", "table", "walk"} <= set(words)
    pairs = adjective_noun_pairs()
    # No adjective comes alone and no noun comes first: there are hyphens in every entry.
    sampled = [pairs[i] for i in range(0, len(pairs), 9973)]
    assert all("-" in pair for pair in sampled)
    assert sampled == sorted(set(sampled))
    assert len(pairs) > 5_000_000


def test_without_wonderwords_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install wonderwords"):
        adjective_noun_pairs()
    with pytest.raises(ModuleNotFoundError, match=r"pip install wonderwords"):
        single_words()


@pytest.mark.parametrize(
    "sentences",
    [
        ["One is here.", "Two is there!", "Is three?", "Yes."],
        ["Dr. Smith met Mrs. J. R. Jones.", "They spoke."],
        ["So did I.", "He left."],
        ['He said "Stop!"', '"No," she said.', "(It was late.)", "'Why?'", "Well..."],
        ["Pi is 3.14 or so.", "22 is even."],
        ["See e.g. Hume.", "Then i.e. nothing."],
        ["It ended. but not for long.", "Truly"],
        ["no end mark"],
    ],
)
def test_sentences_end_where_a_reader_would_end_them(sentences: list[str]) -> None:
    assert split_simply(" ".join(sentences)) == sentences


def test_white_space_between_sentences_is_dropped_and_no_text_is_no_sentence() -> None:
    assert split_simply("One.\n\nTwo.   Three.") == ["One.", "Two.", "Three."]
    assert split_simply("") == []


def test_a_word_longer_than_the_look_back_is_no_abbreviation() -> None:
    assert split_simply("x" * 60 + "mr. Then.") == ["x" * 60 + "mr.", "Then."]


def fake_nltk(split: Callable[[str], list[str]]) -> types.ModuleType:
    module = types.ModuleType("nltk")
    module.__dict__.update(tokenize=types.SimpleNamespace(sent_tokenize=split))
    return module


def test_nltk_is_used_where_it_has_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nltk", fake_nltk(lambda text: text.split("|")))
    assert best_splitter()("a|b") == ["a", "b"]


def test_without_nltk_or_its_data_the_simple_splitter_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_data(text: str) -> list[str]:
        raise LookupError("Resource punkt_tab not found.")

    for module in (None, fake_nltk(no_data)):
        monkeypatch.setitem(sys.modules, "nltk", module)
        assert best_splitter() is split_simply
