"""RULER's scores: references are substrings, case aside; ``all`` is a share, ``part`` is any."""

from __future__ import annotations

import pytest

from hf_kvret.lab.evaluate.ruler import TASKS, sample_score
from hf_kvret.lab.evaluate.ruler.task import clean


def test_all_is_the_share_of_the_references_that_were_found() -> None:
    answer = "They are 1111111, 2222222 and 3333333."
    assert sample_score("niah_multivalue", answer, ["1111111", "2222222"]) == 1.0
    assert sample_score("niah_multivalue", answer, ["1111111", "4444444"]) == 0.5
    assert sample_score("vt", answer, ["ABCDE", "FGHIJ"]) == 0.0


def test_part_asks_for_any_of_the_references() -> None:
    assert sample_score("qa_1", "in Paris, France", ["paris", "the capital"]) == 1.0
    assert sample_score("qa_1", "in Rome", ["paris", "the capital"]) == 0.0


@pytest.mark.parametrize("task", TASKS)
def test_questions_are_scored_by_part_and_all_else_by_all(task: str) -> None:
    expected = 1.0 if task in ("qa_1", "qa_2") else 0.5
    assert sample_score(task, "red", ["red", "blue"]) == expected


def test_case_does_not_count_on_either_side() -> None:
    assert sample_score("qa_2", "THE eiffel Tower", ["The Eiffel tower"]) == 1.0


def test_a_reference_counts_inside_a_longer_word() -> None:
    assert sample_score("qa_2", "abnormal", ["normal"]) == 1.0


def test_control_characters_become_newlines_before_the_comparison() -> None:
    assert clean("\x00\t one\x1ftwo\tthree \x07\n") == "one\ntwo\nthree"
    assert sample_score("qa_1", "new\tyork", ["new york"]) == 0.0
    assert sample_score("qa_1", "new\tyork", ["new\nyork"]) == 1.0
    assert clean("del\x7fete") == "del\x7fete"


def test_a_reference_that_is_only_in_stripped_white_space_is_not_found() -> None:
    assert sample_score("qa_1", "yes ", ["yes "]) == 0.0


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task='vtt' is not .* niah_single_1, .*, qa_2"):
        sample_score("vtt", "x", ["x"])
    with pytest.raises(ValueError, match="at least one right answer"):
        sample_score("vt", "x", [])
    with pytest.raises(TypeError, match=r"such as \['12345'\]"):
        sample_score("vt", "x", "12345")
