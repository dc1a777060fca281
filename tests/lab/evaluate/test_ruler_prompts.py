"""Prompts of RULER: a short search for their size, and a smaller one where a sample is too long."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from hf_kvret.lab.evaluate.ruler import TASKS, RulerData, generate
from hf_kvret.lab.evaluate.ruler.prompts import RETRIES, Draws, Job, Prompts, fitting_size
from hf_kvret.lab.evaluate.ruler.task import Draft


class Words(Prompts):
    """As many words as ``build`` makes of a size, for 100 words with the answer, which takes 30."""

    def __init__(self, build: Callable[[int], int]) -> None:
        self.build = build
        job = Job(TASKS["vt"], str.split, 100, 1, Draws(1), RulerData(), ("", ""))
        super().__init__(job, "vt", 10)

    def draft(self, size: int) -> Draft:
        return Draft("w " * self.build(size), question="", answer_prefix="", outputs=("w",))


def test_the_search_is_short_and_never_tries_three_times_the_length() -> None:
    counts: list[int] = []

    def tokens(size: int) -> int:
        counts.append(40 + 20 * size)
        return counts[-1]

    size = fitting_size(tokens, length=100_000, increment=25, other_tokens=60)
    assert size == (100_000 - 100) // 20
    assert len(counts) <= 16
    assert max(counts) < 1.6 * 100_000


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


def test_random_states_of_modules_are_left_alone() -> None:
    state, numpy_state = random.getstate(), np.random.get_state()
    generate("vt", str.split, 2048, 1)
    assert random.getstate() == state
    assert all(map(np.array_equal, np.random.get_state(), numpy_state))
