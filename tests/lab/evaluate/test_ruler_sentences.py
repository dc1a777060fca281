"""Sentences of an essay are NLTK's where it has its data, else ours; nothing is downloaded."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

from hf_kvret.lab.evaluate.ruler.texts import best_splitter, split_simply


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
