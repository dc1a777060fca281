"""``qa_*``: the question's documents are there, at random places, among others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.ruler import RulerData, Sample, generate

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)


def words(text: str) -> list[str]:
    return re.findall(r"\w+|\S", text)


def filler(seed: int) -> str:
    return " ".join(f"w{(seed * 7 + i) % 97}" for i in range(30)) + "."


def squad() -> dict[str, Any]:
    """30 articles of 4 paragraphs, two questions each; the second can't be answered."""
    articles = []
    for a in range(30):
        paragraphs = []
        for p in range(4):
            answers = [{"text": f"answer {a} {p}"}, {"text": f"also {a} {p}"}]
            paragraphs.append(
                {
                    "context": f"Article {a} paragraph {p}. {filler(a + p)}",
                    "qas": [
                        {"question": f"Which {a} {p}?", "answers": answers},
                        {"question": "Why not?", "answers": [], "is_impossible": True},
                    ],
                }
            )
        articles.append({"paragraphs": paragraphs})
    return {"data": articles}


def hotpot() -> list[dict[str, Any]]:
    return [
        {
            "question": f"Where is {i}?",
            "answer": f"place {i}",
            "context": [
                [f"Title {i} {j}", [f"One of {i} {j}.", f" {filler(i + j)}"]] for j in range(10)
            ],
        }
        for i in range(8)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RulerData:
    folder: Path = tmp_path_factory.mktemp("qa")
    (folder / "squad.json").write_text(json.dumps(squad()), encoding="utf-8")
    (folder / "hotpot.json").write_text(json.dumps(hotpot()), encoding="utf-8")
    return RulerData(squad=folder / "squad.json", hotpot=folder / "hotpot.json")


def documents_of(sample: Sample) -> list[str]:
    head = f"{INSTRUCTION}\n\nThe following are given documents.\n\n"
    assert sample.context.startswith(head)
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", sample.context.removeprefix(head))
    assert parts[0] == ""
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_sample_i_asks_answerable_question_i(data: RulerData) -> None:
    for task, query, outputs in (
        ("qa_1", "Which {a} {p}?", ("answer {a} {p}", "also {a} {p}")),
        ("qa_2", "Where is {i}?", ("place {i}",)),
    ):
        for i, sample in enumerate(generate(task, words, 2048, 6, data=data)):
            numbers = {"a": i // 4, "p": i % 4, "i": i}
            assert sample.index == i
            assert sample.question == f"\n\n{INSTRUCTION}\n\nQuestion: {query.format(**numbers)}"
            assert sample.answer_prefix == " Answer:"
            assert sample.outputs == tuple(text.format(**numbers) for text in outputs)


def test_gold_documents_are_there_with_those_of_the_same_article(data: RulerData) -> None:
    for i, sample in enumerate(generate("qa_1", words, 1024, 6, data=data)):
        documents = documents_of(sample)
        assert len(documents) == len(set(documents)) < 120
        for p in range(4):
            assert any(text.startswith(f"Article {i // 4} paragraph {p}.") for text in documents)
        assert any(not text.startswith(f"Article {i // 4} ") for text in documents)
    for i, sample in enumerate(generate("qa_2", words, 1024, 6, data=data)):
        documents = documents_of(sample)
        gold = [f"Title {i} {j}\nOne of {i} {j}. {filler(i + j)}" for j in range(10)]
        assert set(gold) <= set(documents)
        assert len(documents) == len(set(documents))


def test_documents_are_shuffled_the_same_way_in_every_sample(data: RulerData) -> None:
    places: dict[int, set[int]] = {}
    for i, sample in enumerate(generate("qa_1", words, 1024, 8, data=data)):
        documents = documents_of(sample)
        gold = f"Article {i // 4} paragraph {i % 4}."
        place = next(n for n, text in enumerate(documents) if text.startswith(gold))
        assert 0 < place < len(documents) - 1
        places.setdefault(len(documents), set()).add(place)
    # A fresh generator for each shuffle puts the gold document, which is the first to be shuffled,
    # at the same place among the same number of documents.
    assert all(len(found) == 1 for found in places.values())


def test_all_documents_are_taken_over_and_over_where_they_do_not_fill_the_length(
    data: RulerData,
) -> None:
    sample = generate("qa_2", words, 8192, 1, data=data)[0]
    documents = documents_of(sample)
    assert len(set(documents)) == 80
    assert len(documents) > 80
    assert sample.length > 0.9 * 8192


def test_a_length_that_leaves_no_room_for_other_documents_keeps_the_gold_ones(
    tmp_path: Path,
) -> None:
    # Question 0 has short documents, so that far too many are fitted to question 1.
    items = hotpot()[:6]
    items[0]["context"] = [[f"T{j}", ["Short."]] for j in range(10)]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(items), encoding="utf-8")
    second = generate("qa_2", words, 600, 2, data=RulerData(hotpot=path))[1]
    assert len(documents_of(second)) == 10
    assert all(text.startswith("Title 1 ") for text in documents_of(second))


def test_more_samples_than_questions_are_refused(data: RulerData) -> None:
    with pytest.raises(ValueError, match=r"samples=9 .*data\.hotpot has 8 questions"):
        generate("qa_2", words, 2048, 9, data=data)
    with pytest.raises(ValueError, match=r"samples=121 .*data\.squad has 120 questions"):
        generate("qa_1", words, 2048, 121, data=data)


def test_gold_documents_that_do_not_fit_make_the_length_too_short(data: RulerData) -> None:
    with pytest.raises(ValueError, match=r"length=300 is too short for task 'qa_2'.*at least"):
        generate("qa_2", words, 300, 1, data=data)
