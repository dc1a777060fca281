"""The search for a size finds the largest that fits; the draws are those of the modules."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hf_kvret.lab.evaluate.ruler.fitting import (
    RETRIES,
    Draws,
    Job,
    draw_fitting,
    fitting_size,
    largest_size,
    smaller,
)
from hf_kvret.lab.evaluate.ruler.task import TASKS, Draft


def job(length: int) -> Job:
    """One that counts words; the task's answer takes 30."""
    return Job(TASKS["vt"], length, 1, lambda text: len(text.split()), Draws(1))


def words(count: int) -> Draft:
    return Draft(context="w " * count, question="", answer_prefix="", outputs=("w",))


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

    def build(size: int) -> Draft:
        sizes.append(size)
        return words(size)

    draft, length = draw_fitting(job(100), build, 90, 10)
    assert sizes == [90, 80, 70]
    assert length == 100
    assert draft == words(70)


def test_the_smallest_size_is_drawn_again_before_a_length_is_too_short() -> None:
    counts = iter([80, 75, 69])
    assert draw_fitting(job(100), lambda size: words(next(counts)), 10, 10)[1] == 99

    drawn: list[int] = []

    def too_long(size: int) -> Draft:
        drawn.append(size)
        return words(75 + len(drawn) % 3)

    with pytest.raises(ValueError, match=r"length=100 .*'vt'.*takes 107 tokens.*at least 107"):
        draw_fitting(job(100), too_long, 25, 10)
    assert drawn == [25, 15] + [5] * RETRIES


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
