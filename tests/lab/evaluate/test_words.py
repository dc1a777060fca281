"""Words to draw from: all pairs in order, made on demand."""

from __future__ import annotations

from hf_kvret.lab.evaluate.words import adjective_noun_pairs, single_words


def test_the_lists_are_those_of_wonderwords() -> None:
    words = single_words()
    assert words == sorted(set(words))
    # An adjective, a noun and a verb.
    assert {"happy", "table", "walk"} <= set(words)
    assert len(adjective_noun_pairs()) > 5_000_000
