"""Words to draw from: all pairs in order, made on demand."""

from __future__ import annotations

import random
import sys

import pytest

from hf_kvret.lab.evaluate.words import Pairs, adjective_noun_pairs, single_words


def brute_force(firsts: list[str], seconds: list[str]) -> list[str]:
    return sorted({f"{first}-{second}" for first in firsts for second in seconds})


@pytest.mark.parametrize(
    ("firsts", "seconds"),
    [
        (["red", "blue", "red"], ["cat", "ant", "cat"]),
        (["blue-eyed", "blue", "blu", "green"], ["zebra", "ape", "eyed-cat", "f"]),
        (["a", "a-b", "a-b-c", "ab", "a b"], ["x", "b-x", "b-c-x", "c"]),
        (["one"], ["two"]),
        (["Big", "big", "éa"], ["Ñu", "nu"]),
    ],
)
def test_pairs_are_the_sorted_set_of_all_pairs(firsts: list[str], seconds: list[str]) -> None:
    expected = brute_force(firsts, seconds)
    pairs = Pairs(firsts, seconds)
    assert len(pairs) == len(expected)
    assert list(pairs) == expected


def test_random_choice_draws_from_pairs_as_from_the_list() -> None:
    firsts, seconds = ["wide", "wide-eyed", "old"], [f"noun{i}" for i in range(37)]
    expected = brute_force(firsts, seconds)
    drawn, listed = random.Random(5), random.Random(5)
    pairs = Pairs(firsts, seconds)
    assert [drawn.choice(pairs) for _ in range(50)] == [listed.choice(expected) for _ in range(50)]


def test_positions_outside_are_refused() -> None:
    pairs = Pairs(["a"], ["x", "y"])
    for index in (2, -1):
        with pytest.raises(IndexError, match="outside 2 pairs"):
            pairs[index]
    assert len(Pairs([], ["x"])) == 0


def test_the_lists_are_those_of_wonderwords() -> None:
    words = single_words()
    assert words == sorted(set(words))
    # An adjective, a noun and a verb.
    assert {"happy", "table", "walk"} <= set(words)
    pairs = adjective_noun_pairs()
    # No adjective comes alone and no noun comes first: there are hyphens in every entry.
    sampled = [pairs[i] for i in range(0, len(pairs), 9973)]
    assert all("-" in pair for pair in sampled)
    assert sampled == sorted(set(sampled))
    assert len(pairs) > 5_000_000


def test_without_wonderwords_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install wonderwords"):
        adjective_noun_pairs()
    with pytest.raises(ModuleNotFoundError, match=r"pip install wonderwords"):
        single_words()
