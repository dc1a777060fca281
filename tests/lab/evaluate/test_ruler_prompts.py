"""Prompts of RULER: the largest size that fits, seeded draws, and templates inside a chat."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from hf_kvret.lab.evaluate.ruler.prompts import (
    RETRIES,
    Draws,
    Job,
    Prompts,
    Template,
    fitting_size,
    largest_size,
    smaller,
)
from hf_kvret.lab.evaluate.ruler.task import TASKS, Draft


class Words(Prompts):
    """As many words as ``build`` makes of a size, for 100 words with the answer, which takes 30."""

    def __init__(self, build: Callable[[int], int]) -> None:
        self.build = build
        super().__init__(
            Job(TASKS["vt"], 100, 1, lambda text: len(text.split()), Draws(1)), "vt", 10
        )

    def draft(self, size: int) -> Draft:
        return Draft("w " * self.build(size), question="", answer_prefix="", outputs=("w",))


def test_the_largest_size_that_fits_is_found_wherever_it_is() -> None:
    for best in range(5, 40):
        assert largest_size(lambda size: 3 * size, 3 * best + 2, 5, 40) == best
    assert largest_size(lambda size: 3 * size, 10_000, 5, 40) == 40
    assert largest_size(lambda size: 3 * size, 1, 5, 40) == 5


def test_the_search_is_short_and_never_tries_three_times_the_length() -> None:
    tried: list[int] = []

    def tokens(size: int) -> int:
        tried.append(40 + 20 * size)
        return tried[-1]

    size = fitting_size(tokens, length=100_000, increment=25, other_tokens=60)
    assert size == (100_000 - 100) // 20
    assert len(tried) <= 16
    assert max(tried) < 1.6 * 100_000


def test_other_tokens_take_their_part_of_the_length() -> None:
    assert fitting_size(lambda size: 2 * size, 1000, 10, 0) == 500
    assert fitting_size(lambda size: 2 * size, 1000, 10, 100) == 450


@pytest.mark.parametrize(
    ("size", "increment", "smallest", "expected"),
    [(60, 25, 1, 35), (35, 25, 1, 10), (10, 25, 1, 10), (25, 25, 1, 25), (13, 10, 5, 5)],
)
def test_sizes_shrink_by_an_increment_until_one_is_reached(
    size: int, increment: int, smallest: int, expected: int
) -> None:
    assert smaller(size, increment, smallest) == expected


def test_a_sample_that_is_too_long_is_drawn_again_smaller() -> None:
    sizes: list[int] = []
    sample = Words(lambda size: sizes.append(size) or size).sample(3, 90)
    assert sizes == [90, 80, 70]
    assert (sample.index, sample.length, sample.prompt) == (3, 100, "w " * 70)


def test_the_smallest_size_is_drawn_again_before_a_length_is_too_short() -> None:
    counts = iter([80, 75, 69])
    assert Words(lambda size: next(counts)).sample(0, 10).length == 99

    sizes: list[int] = []

    def too_long(size: int) -> int:
        sizes.append(size)
        return 75 + len(sizes) % 3

    with pytest.raises(ValueError, match=r"length=100 .*'vt'.*takes 107 tokens.*at least 107"):
        Words(too_long).sample(0, 25)
    assert sizes == [25, 15] + [5] * RETRIES


def test_draws_are_those_of_the_seeded_modules() -> None:
    state, numpy_state = random.getstate(), np.random.get_state()
    draws = Draws(42)
    items = list(range(20))
    ours = [
        draws.python.randint(1_000_000, 9_999_999),
        draws.python.sample(range(1000), 5),
        draws.python.getrandbits(128),
        draws.python.choices("abc", k=4),
        int(draws.numpy.randint(10_000, 99_999)),
    ]
    assert random.getstate() == state
    assert all(
        np.array_equal(now, before)
        for now, before in zip(np.random.get_state(), numpy_state, strict=True)
    )
    random.seed(42)
    np.random.seed(42)
    modules = [
        random.randint(1_000_000, 9_999_999),
        random.sample(range(1000), 5),
        random.getrandbits(128),
        random.choices("abc", k=4),
        int(np.random.randint(10_000, 99_999)),
    ]
    random.setstate(state)
    np.random.set_state(numpy_state)
    assert ours == modules

    first, second = list(items), list(items)
    draws.shuffle(first)
    draws.shuffle(second)
    assert first == second != items


TEXT = "Read {kind}:\n{context}\nWhat is {query}?"


def chat(message: str) -> str:
    return f"<sys>{{x}} You are kind.<user>{message}<end><bot>"


def test_the_prefix_stands_behind_the_end_of_the_chat_template() -> None:
    template = Template(TEXT, " The {query} is", chat)
    draft = template.fill("some {braces}", ("a",), kind="this", query="it")
    assert draft.context == "<sys>{x} You are kind.<user>Read this:\nsome {braces}"
    assert draft.question == "\nWhat is it?<end><bot>"
    assert draft.answer_prefix == " The it is"
    assert draft.prompt == draft.context + draft.question + draft.answer_prefix
    assert draft.outputs == ("a",)


def test_without_a_chat_template_there_is_the_task_alone() -> None:
    draft = Template(TEXT, "", None).fill("c", ("a",), kind="k", query="q")
    assert draft.prompt == "Read k:\nc\nWhat is q?"


def test_an_example_goes_between_chat_template_and_task() -> None:
    template = Template(TEXT, "", chat)
    draft = template.fill("c", ("a",), kind="k", query="q")
    shown = template.fill("c", ("a",), "example\n", kind="k", query="q")
    assert shown.context == "<sys>{x} You are kind.<user>example\nRead k:\nc"
    assert shown.question == draft.question


@pytest.mark.parametrize(
    "wrong",
    [
        lambda message: "nothing of it",
        lambda message: message.replace("\n", " "),
        lambda message: message + message,
    ],
)
def test_a_chat_template_that_changes_its_message_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="once and unchanged"):
        Template(TEXT, "", wrong)  # type: ignore[arg-type]
