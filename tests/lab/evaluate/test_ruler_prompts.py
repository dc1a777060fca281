"""Samples of RULER's tasks: they hold what is asked for, fill their length, and are scored."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.ruler.prompts import (
    TASKS,
    Sample,
    adjective_noun_pairs,
    generate,
    read_questions,
    sample_score,
    single_words,
)

Make = Callable[..., list[Sample]]


def words(text: str) -> list[str]:
    return re.findall(r"\w+|\S", text)


def passage(start: int, sentences: int) -> str:
    """Sentences of words that are neither all the same nor in order."""
    return " ".join(
        f"Thing {i} has {i * i % 71} parts, and {'so' * (i % 3 + 1)} it {'is' if i % 2 else 'was'}."
        for i in range(start, start + sentences)
    )


def article(number: int) -> dict[str, Any]:
    """An article of SQuAD, with a question about each of its paragraphs."""
    paragraphs = []
    for place in range(2 + number % 3):
        answers = [{"text": f"{number} {place}"}, {"text": f"it is {number}"}]
        asked = {"question": f"What of {number} and {place}? ", "answers": answers}
        text = passage(31 * number + 7 * place, 3 + (number + place) % 4)
        paragraphs.append({"context": text, "qas": [asked]})
    return {"paragraphs": paragraphs}


def item(number: int) -> dict[str, Any]:
    """An item of HotpotQA with ten documents."""
    documents = [
        [f"Title {number + j}", [passage(number + 5 * j, 2), " " + passage(j, 1 + j % 3)]]
        for j in range(10)
    ]
    return {"question": f"Which of {number}?", "answer": f"number {number}", "context": documents}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Essays, SQuAD and HotpotQA in the formats of RULER's files."""
    folder = tmp_path_factory.mktemp("texts")
    texts = {
        "essays": {"text": passage(0, 120)},
        "squad": {"data": [article(number) for number in range(40)]},
        "hotpot": [item(number) for number in range(12)],
    }
    for name, content in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def make(folder: Path) -> Make:
    """``generate`` with the file that a task needs."""

    def samples(task: str, length: int, count: int, **options: Any) -> list[Sample]:
        data = TASKS[task].data
        options = {"encode": words, "data": data and folder / f"{data}.json"} | options
        return generate(task, length=length, samples=count, **options)

    return samples


@pytest.mark.parametrize("task", TASKS)
def test_samples_fill_their_length_and_are_known_by_their_seed(task: str, make: Make) -> None:
    state = random.getstate()
    first = make(task, 2048, 3)
    assert random.getstate() == state
    assert make(task, 2048, 2) == first[:2] and make(task, 2048, 3, seed=7) != first
    assert len({sample.prompt for sample in first}) == 3
    assert all(sample.question.startswith("\n") and all(sample.outputs) for sample in first)
    # A tokenizer whose tokens are characters, too.
    for encode, length in ((words, 4096), (list, 16_384)):
        totals = [
            len(encode(sample.prompt)) + TASKS[task].max_new_tokens
            for sample in make(task, length, 3, encode=encode)
        ]
        # Units of lists are thirty times a word, and documents differ in length.
        assert 0.8 * length <= min(totals) and 0.9 * length <= max(totals) <= length


@pytest.mark.parametrize("task", [name for name in TASKS if name.startswith("niah")])
def test_every_value_that_is_asked_for_is_a_needle_of_its_key(task: str, make: Make) -> None:
    known = TASKS[task]
    for sample in make(task, 4096, 2):
        needles = dict[str, list[str]]()
        needle = r"One of the special magic \w+ for (\S+) is: (\S+)\."
        for key, value in re.findall(needle, sample.context):
            needles.setdefault(key, []).append(value)
        if known.haystack == "noise":
            assert len(needles) == known.keys
        asked = [key for key in needles if key in sample.question]
        assert len(asked) == known.queries and len(sample.outputs) == known.queries * known.values
        assert sorted(sample.outputs) == sorted(value for key in asked for value in needles[key])
        assert (" is hidden" in sample.context) == (len(sample.outputs) == 1)


def test_needles_stand_between_the_sentences_of_an_essay_that_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "essay.txt"
    path.write_text('Only\tthis  "sentence." And\nthat one.', encoding="utf-8")
    (sample,) = generate("niah_multivalue", words, 1500, 1, data=path)
    essay = re.sub(r"One of the special [^.]*\. ?", "", sample.context.split("\n")[1])
    sentences = essay.strip().replace('" And', '"| And').replace(". Only", ".| Only").split("| ")
    assert set(sentences) == {'Only this "sentence."', "And that one."} and len(sentences) > 100


def test_a_chain_leads_from_its_value_to_all_variables(make: Make) -> None:
    for sample in make("vt", 2048, 3):
        _, _, own = sample.context.rpartition("Memorize and track")
        (value,) = re.findall(r"assigned the value (\d+) in the text", sample.question)
        found = [re.findall(rf"VAR (\w+) = {value}\n", own)[0]]
        while following := re.findall(rf"VAR (\w+) = VAR {found[-1]}\b", own):
            found += following
        assert tuple(found) == sample.outputs and len(found) == 5


@pytest.mark.parametrize(("length", "repeats"), [(2048, {6, 1}), (4096, {30, 3})])
def test_common_words_come_more_often_than_the_others(
    length: int, repeats: set[int], make: Make
) -> None:
    for sample in make("cwe", length, 2):
        own = sample.context.rpartition("Below is a numbered list")[2]
        counts = Counter(re.findall(r"\d+\. (\S+)", own))
        common = {word for word, count in counts.items() if count == max(repeats)}
        assert common == set(sample.outputs) and set(counts.values()) == repeats


def test_coded_words_that_are_asked_for_are_the_most_frequent(make: Make) -> None:
    for length in range(200, 420, 20):
        for sample in make("fwe", length, 2):
            assert set(sample.outputs) <= set(sample.context.split(" "))
    (sample,) = make("fwe", 4096, 1)
    counts = Counter(sample.context.split(" "))
    assert sample.outputs == tuple(word for word, _ in counts.most_common(4) if word != "...")


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_gold_documents_are_in_the_context_and_start_over_where_they_dont_fill_it(
    task: str, make: Make, folder: Path
) -> None:
    option = str(TASKS[task].data)
    questions, documents = read_questions(option, folder / f"{option}.json")
    for length in (2048, 16_384):
        for index, sample in enumerate(make(task, length, 2)):
            shown = re.split(r"(?:\n\n)?Document \d+:\n", sample.context)[1:]
            assert set(questions[index].gold) <= set(shown) <= set(documents)
            assert len(set(shown)) == min(len(shown), len(documents))
            assert sample.outputs == questions[index].outputs
            assert questions[index].query in sample.question
    with pytest.raises(ValueError, match=f"'{task}' has {len(questions)} questions in its file"):
        make(task, 2048, len(questions) + 1)


def test_a_length_that_is_too_short_names_one_that_will_do(make: Make) -> None:
    for task in ("niah_single_1", "cwe", "qa_2"):
        message = f"length=100 is too short for task '{task}'"
        with pytest.raises(ValueError, match=message) as caught:
            make(task, 100, 1)
        least = int(str(caught.value).rpartition("at least ")[2])
        assert least > 100 and len(make(task, least, 1)) == 1


def test_questions_come_with_all_documents_once_each(tmp_path: Path) -> None:
    """Questions that have no answer are left out; a document of HotpotQA begins with its title."""
    first = {"question": "Q0?", "answers": [{"text": "a"}, {"text": "b"}]}
    nobody = {"question": "Q1?", "answers": [], "is_impossible": True}
    second = {"question": "Q2?", "answers": [{"text": "c"}]}
    zebra = {"context": "Zebra text.", "qas": [first, nobody]}
    apple = {"context": "Apple text.", "qas": [second]}
    melon = {"context": "Melon text.", "qas": []}
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [zebra, apple]}, {"paragraphs": [melon]}]}))
    questions, documents = read_questions("squad", path)
    assert documents == ["Apple text.", "Melon text.", "Zebra text."]
    assert questions == [
        ("Q0?", ("a", "b"), ["Zebra text."], ["Apple text."]),
        ("Q2?", ("c",), ["Apple text."], ["Zebra text."]),
    ]
    two = {"question": "Q0?", "answer": "a", "context": [["B", ["x.", " y."]], ["A", ["z."]]]}
    one = {"question": "Q1?", "answer": "b", "context": [["A", ["z."]]]}
    path.write_text(json.dumps([two, one]))
    questions, documents = read_questions("hotpot", path)
    assert documents == ["A\nz.", "B\nx. y."]
    assert questions == [("Q0?", ("a",), documents[::-1], []), ("Q1?", ("b",), documents[:1], [])]


@pytest.mark.parametrize(
    ("option", "content", "problem"),
    [
        ("squad", '{"dta": []}', r"SQuAD's JSON format \(KeyError\('data'\)\)"),
        ("squad", '{"data": []}', "has no answerable question"),
        ("hotpot", '{"data": []}', "HotpotQA's JSON format"),
    ],
)
def test_files_of_another_format_are_refused(
    tmp_path: Path, option: str, content: str, problem: str
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"--{option} .*wrong\.json (is not in )?{problem}"):
        read_questions(option, path)


@pytest.mark.parametrize(
    ("task", "answer", "references", "score"),
    [
        ("niah_multivalue", "They are 1111111, 2222222.", ["1111111", "2222222"], 1.0),
        ("niah_multivalue", "They are 1111111, 2222222.", ["1111111", "4444444"], 0.5),
        ("qa_1", "in Paris, France", ["paris", "the capital"], 1.0),
        ("qa_1", "in Rome", ["paris", "the capital"], 0.0),
        # A reference counts inside a longer word.
        ("qa_2", "abnormal", ["normal"], 1.0),
        # Control characters become newlines before the comparison.
        ("qa_1", "new\tyork", ["new\nyork"], 1.0),
        # White space at the ends is stripped from the answer, and not from references.
        ("qa_1", "yes ", ["yes "], 0.0),
    ],
)
def test_scores_count_references_in_an_answer(
    task: str, answer: str, references: list[str], score: float
) -> None:
    assert sample_score(task, answer, references) == score


def test_the_lists_of_words_are_those_of_wonderwords() -> None:
    words = single_words()
    assert words == sorted(set(words))
    # An adjective, a noun and a verb.
    assert {"happy", "table", "walk"} <= set(words)
    assert len(adjective_noun_pairs()) > 5_000_000
