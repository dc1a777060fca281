"""``niah_*``: what is hidden where, what is asked for, and how the templates read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hf_kvret.lab.evaluate.ruler import RulerData, Sample, generate

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# A few of the nouns and adjectives are two words.
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for ([^:]+) is: (\S+)\.")
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

# haystack, keys, values, queries, kind of the key, kind of the value
LAYOUT = {
    "niah_single_1": ("noise", 1, 1, 1, "words", "numbers"),
    "niah_single_2": ("essay", 1, 1, 1, "words", "numbers"),
    "niah_single_3": ("essay", 1, 1, 1, "words", "uuids"),
    "niah_multikey_1": ("essay", 4, 1, 1, "words", "numbers"),
    "niah_multikey_2": ("needle", 1, 1, 1, "words", "numbers"),
    "niah_multikey_3": ("needle", 1, 1, 1, "uuids", "uuids"),
    "niah_multivalue": ("essay", 1, 4, 1, "words", "numbers"),
    "niah_multiquery": ("essay", 4, 1, 4, "words", "numbers"),
}


def words(text: str) -> list[str]:
    return text.split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RulerData:
    text = " ".join(f"Essay sentence {i} says what it says." for i in range(400))
    path: Path = tmp_path_factory.mktemp("niah") / "essays.json"
    path.write_text(json.dumps({"text": text}), encoding="utf-8")
    return RulerData(essays=path)


@pytest.fixture(scope="module", params=LAYOUT)
def made(request: pytest.FixtureRequest, data: RulerData) -> tuple[str, list[Sample]]:
    return request.param, generate(request.param, words, 2500, 4, data=data)


def haystack_of(sample: Sample) -> str:
    """What stands between the instruction's line and the question's."""
    return sample.context.split("\n", 1)[1]


def test_instruction_and_question_are_singular_for_one_answer_and_plural_for_more(
    made: tuple[str, list[Sample]],
) -> None:
    task, samples = made
    _, _, values, queries, _, kind = LAYOUT[task]
    for sample in samples:
        head = sample.context.split("\n", 1)[0]
        if values * queries == 1:
            one = kind.removesuffix("s")
            assert head == (
                f"A special magic {one} is hidden within the following text. Make sure to "
                f"memorize it. I will quiz you about the {one} afterwards."
            )
            question = f"\nWhat is the special magic {one} for (.+) mentioned in the provided text?"
            prefix = f" The special magic {one} for (.+) mentioned in the provided text is"
        else:
            assert head == (
                f"Some special magic {kind} are hidden within the following text. Make sure to "
                f"memorize it. I will quiz you about the {kind} afterwards."
            )
            question = (
                f"\nWhat are all the special magic {kind} for (.+) mentioned in the provided text?"
            )
            prefix = f" The special magic {kind} for (.+) mentioned in the provided text are"
        asked = re.fullmatch(question.replace("?", r"\?"), sample.question)
        begun = re.fullmatch(prefix, sample.answer_prefix)
        assert asked is not None
        assert begun is not None
        assert asked[1] == begun[1]
        assert sample.input == sample.context + sample.question


def test_needles_have_the_kinds_and_counts_of_the_task(made: tuple[str, list[Sample]]) -> None:
    task, samples = made
    haystack, keys, values, queries, key_kind, value_kind = LAYOUT[task]
    for sample in samples:
        needles = NEEDLE.findall(sample.context)
        if haystack != "needle":
            assert len(needles) == keys * values
            assert len({key for _, key, _ in needles}) == keys
        for plural, key, value in needles:
            assert plural == value_kind
            assert (UUID.fullmatch(key) is not None) == (key_kind == "uuids")
            pattern = UUID if value_kind == "uuids" else re.compile(r"[1-9][0-9]{6}")
            assert pattern.fullmatch(value)
        assert len(sample.outputs) == values * queries


def test_the_references_are_the_values_of_the_keys_asked_for(
    made: tuple[str, list[Sample]],
) -> None:
    task, samples = made
    queries = LAYOUT[task][3]
    for sample in samples:
        hidden: dict[str, list[str]] = {}
        for _, key, value in NEEDLE.findall(sample.context):
            hidden.setdefault(key, []).append(value)
        match = re.search(r" for (.+) mentioned", sample.question)
        assert match is not None
        asked = re.split(r", and |, ", match[1])
        assert len(asked) == queries
        if queries > 1:
            assert match[1] == f"{', '.join(asked[:-1])}, and {asked[-1]}"
        expected = [value for key in asked for value in hidden[key]]
        assert sorted(sample.outputs) == sorted(expected)
        if queries > 1:
            assert list(sample.outputs) == expected


def test_haystacks_are_what_the_task_says(made: tuple[str, list[Sample]]) -> None:
    task, samples = made
    for sample in samples:
        haystack = haystack_of(sample)
        if LAYOUT[task][0] == "noise":
            lines = haystack.split("\n")
            assert lines.count(NOISE) == len(lines) - 1 > 100
        elif LAYOUT[task][0] == "needle":
            lines = haystack.split("\n")
            assert len(lines) > 100
            assert all(NEEDLE.fullmatch(line) for line in lines)
        else:
            assert "\n" not in haystack
            rest = re.sub(r" ?\bOne of the special magic \w+ for [^:]+ is: \S+\.", "", haystack)
            expected = "Essay sentence 0 says what it says. Essay sentence 1 says what it says."
            assert rest.strip().startswith(expected)


def test_an_essay_needle_stands_between_sentences_at_a_depth_of_the_grid(data: RulerData) -> None:
    depths = set()
    grid = {round(i * 100 / 39) for i in range(40)}
    for sample in generate("niah_single_2", words, 2500, 40, data=data):
        before, _, after = haystack_of(sample).partition(NEEDLE.search(sample.context)[0])  # type: ignore[index]
        assert before.strip() == "" or before.endswith("it says. ")
        count_before, count_after = before.count("Essay"), after.count("Essay")
        total = count_before + count_after
        fitting = {depth for depth in grid if int(total * (depth / 100)) == count_before}
        assert fitting
        depths |= fitting
    assert min(depths) < 20
    assert max(depths) > 80


def test_an_essay_that_is_too_short_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "essay.txt"
    path.write_text("Only\tthis  sentence.\nAnd that one.", encoding="utf-8")
    sample = generate("niah_single_2", words, 2500, 1, data=RulerData(essays=path))[0]
    assert "Only this sentence. And that one. Only this sentence. And" in sample.context
    assert sample.length > 0.7 * 2500


def test_noise_needles_are_anywhere(data: RulerData) -> None:
    places = []
    for sample in generate("niah_single_1", words, 4096, 30):
        lines = haystack_of(sample).split("\n")
        places.append(next(i for i, line in enumerate(lines) if line != NOISE) / len(lines))
    assert min(places) < 0.2
    assert max(places) > 0.8


def test_the_asked_key_of_multikey_1_varies_and_multiquery_asks_in_random_order(
    data: RulerData,
) -> None:
    where = set()
    for sample in generate("niah_multikey_1", words, 2500, 20, data=data):
        values = [value for _, _, value in NEEDLE.findall(sample.context)]
        where.add(values.index(sample.outputs[0]))
    assert where == {0, 1, 2, 3}
    orders = set()
    for sample in generate("niah_multiquery", words, 2500, 10, data=data):
        values = [value for _, _, value in NEEDLE.findall(sample.context)]
        orders.add(tuple(values.index(value) for value in sample.outputs))
    assert len(orders) > 3


def test_the_chat_template_keeps_its_words_when_the_task_is_put_in_the_singular() -> None:
    sample = generate(
        "niah_single_1",
        words,
        2500,
        1,
        chat_template=lambda text: f"Some answers are here.\n<user>{text}<bot>",
    )[0]
    assert sample.context.startswith("Some answers are here.\n<user>A special magic number is ")
    assert sample.question.endswith(" mentioned in the provided text?<bot>")
    assert sample.answer_prefix.endswith("text is")
