"""LongBench's scores equal those of its own code and of the packages that it uses.

The numbers were made with LongBench/metrics.py at 2e00731, rouge 1.0.1, and fuzzywuzzy 0.18.0
without python-Levenshtein.
"""

from __future__ import annotations

import pytest

from hf_kvret.evaluation.longbench import BUCKETS, LONG_TASKS, bucket
from hf_kvret.evaluation.longbench.metrics import (
    classification,
    code_similarity,
    count,
    retrieval,
    rouge_l,
    word_f1,
)

REPORT = (
    "The agency spent 3.5 million dollars. It did not say why. Auditors found that the agency had "
    "no plan, and the plan it had was late."
)
SUMMARY = "Auditors found the agency spent 3.5 million without a plan. The agency was late."


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        (SUMMARY, REPORT, 0.6315789427146814),
        (REPORT, SUMMARY, 0.6315789427146814),
        ("a b c. d e f.", "a c b. d f e", 0.6666666616666668),
        ("The cat. ", "the cat.", 0.39999999520000007),
        (" .a", "a", 0.6666666622222223),
        ("", "a", 0.0),
        ("...", "a", 0.0),
        ("a b a b", "b a b a", 0.999999995),
    ],
)
def test_rouge_l_is_that_of_the_package(answer: str, reference: str, score: float) -> None:
    assert rouge_l(answer, reference) == pytest.approx(score, abs=1e-12)


def test_rouge_l_survives_long_sentences() -> None:
    # The package's recursion fails here.
    assert rouge_l("x " * 600, "x y " * 400) == pytest.approx(2 / 3)


def test_word_f1_ignores_case_punctuation_and_articles() -> None:
    assert word_f1("The Cat, a dog!", "cat dog") == 1.0
    # Counts matter: one of two cats is matched, precision 1/2, recall 1/3.
    assert word_f1("cat cat", "cat dog bird") == pytest.approx(0.4)
    assert word_f1("", "cat") == word_f1("the", "cat") == word_f1("bird", "cat") == 0.0


def test_classification_divides_by_the_names_found() -> None:
    classes = ["Animal", "Animal name", "Place", "Date"]
    assert classification("Place", "Place", classes) == 1.0
    assert classification("Place or Date", "Place", classes) == 0.5
    assert classification("Date", "Place", classes) == 0.0
    # A name that is a part of the reference was not meant.
    assert classification("Animal name", "Animal name", classes) == 1.0
    # The original skips the name after a deleted one.
    assert classification("a b abc", "abc", ["a", "b", "abc"]) == 0.5


def test_numbers_count_as_a_share_of_all_numbers() -> None:
    assert retrieval("Paragraph 7, not 12", "Paragraph 7") == 0.5
    assert retrieval("Paragraph 17", "Paragraph 7") == 0.0
    assert count("4 and 4 and 5", "4") == pytest.approx(2 / 3)
    assert count("none", "4") == 0.0
    with pytest.raises(ValueError, match="'7' is not of the form"):
        retrieval("7", "7")


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("x = foo(1)", "x = foo(2)", 0.9),
        ("\n# note\n`code`\n// c\n    return a + b\nnext", "return a+b", 0.77),
        ("# only", "x", 0.0),
        ("x", "x", 1.0),
        ("abcdefgh", "hgfedcba", 0.12),
        ("for i in range(10): " * 15, "for j in range(10): " * 15, 0.01),
        ("ab" * 10 + "c", "c" + "ab" * 9, 0.9),
    ],
)
def test_code_similarity_is_that_of_fuzzywuzzy(answer: str, reference: str, score: float) -> None:
    assert code_similarity(answer, reference) == pytest.approx(score, abs=1e-12)


def test_the_best_reference_counts_and_the_first_line_where_it_is_asked_for() -> None:
    answer = "\n\nParis\nLondon"
    assert LONG_TASKS["triviaqa"].score(answer, ["Rome", "paris"], ()) == 1.0
    assert LONG_TASKS["triviaqa"].score(answer, ["London"], ()) == 0.0
    assert LONG_TASKS["hotpotqa"].score(answer, ["London"], ()) == pytest.approx(2 / 3)
    assert LONG_TASKS["hotpotqa"].score("", ["London"], ()) == 0.0


def test_the_tasks_are_those_of_the_paper() -> None:
    assert len(LONG_TASKS) == 16
    assert sum(task.even for task in LONG_TASKS.values()) == 13
    lengths = {name: task.max_new_tokens for name, task in LONG_TASKS.items()}
    assert [name for name, length in lengths.items() if length == 512] == [
        "gov_report",
        "qmsum",
        "multi_news",
    ]
    assert (lengths["samsum"], lengths["lcc"], lengths["triviaqa"]) == (128, 64, 32)
    plain = {name for name, task in LONG_TASKS.items() if not task.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}


def test_buckets_have_their_lower_bounds_inside() -> None:
    assert [bucket(n) for n in (0, 3999, 4000, 7999, 8000)] == [
        "0-4k",
        "0-4k",
        "4-8k",
        "4-8k",
        "8k+",
    ]
    assert list(BUCKETS) == ["0-4k", "4-8k", "8k+"]
