"""Words to draw from: all pairs in order, made on demand."""

from __future__ import annotations

import random

from hf_kvret.lab.evaluate.words import Pairs, adjective_noun_pairs, single_words


def test_pairs_are_all_pairs_once_and_in_order() -> None:
    pairs = Pairs(["red", "blue", "red"], ["cat", "ant", "cat"])
    expected = ["blue-ant", "blue-cat", "red-ant", "red-cat"]
    assert [pairs[index] for index in range(len(pairs))] == expected
    assert random.Random(5).choice(pairs) == random.Random(5).choice(expected)


def test_the_lists_are_those_of_wonderwords() -> None:
    words = single_words()
    assert words == sorted(set(words))
    # An adjective, a noun and a verb.
    assert {"happy", "table", "walk"} <= set(words)
    assert len(adjective_noun_pairs()) > 5_000_000
