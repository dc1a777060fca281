"""The needle language: documents hold what they say, and nothing looks like a needle by chance."""

from __future__ import annotations

import numpy as np
import pytest

from hf_kvret.lab.evaluate.needles import NeedleLanguage

LANGUAGE = NeedleLanguage()


def test_a_document_holds_every_needle_at_its_start_and_noise_elsewhere() -> None:
    rng = np.random.default_rng(0)
    keys, values = LANGUAGE.pairs(rng, 20)
    tokens, starts = LANGUAGE.document(rng, 400, keys, values)
    assert tokens.shape == (400,)
    assert tokens[0] == LANGUAGE.bos
    covered = np.zeros(400, dtype=bool)
    covered[0] = True
    for start, key, value in zip(starts, keys, values, strict=True):
        assert tokens[start : start + 5].tolist() == [LANGUAGE.needle, *key, *value]
        assert not covered[start : start + 5].any()
        covered[start : start + 5] = True
    assert (tokens[~covered] >= LANGUAGE.first_noise).all()
    assert (tokens < LANGUAGE.vocab_size).all()


def test_keys_are_distinct_and_kinds_of_token_never_mix() -> None:
    keys, values = LANGUAGE.pairs(np.random.default_rng(1), 500)
    assert len({tuple(key) for key in keys}) == 500
    assert keys.min() >= LANGUAGE.first_key
    assert keys.max() < LANGUAGE.first_value
    assert values.min() >= LANGUAGE.first_value
    assert values.max() < LANGUAGE.first_noise


def test_questions_are_the_key_between_marker_and_arrow() -> None:
    keys = np.array([[8, 9], [10, 11]])
    expected = [
        [LANGUAGE.question, 8, 9, LANGUAGE.arrow],
        [LANGUAGE.question, 10, 11, LANGUAGE.arrow],
    ]
    assert LANGUAGE.questions(keys).tolist() == expected


def test_noise_follows_zipf() -> None:
    noise = LANGUAGE.noise(np.random.default_rng(2), 200_000) - LANGUAGE.first_noise
    counts = np.bincount(noise)
    # The second word is 2 ** 1.1 = 2.14 times rarer than the first; 1% sampling error.
    assert counts[0] / counts[1] == pytest.approx(2.14, rel=0.05)


def test_the_same_seed_gives_the_same_document() -> None:
    def make(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return LANGUAGE.document(rng, 300, *LANGUAGE.pairs(rng, 10))[0]

    assert (make(3) == make(3)).all()
    assert (make(3) != make(4)).any()


def test_a_document_that_is_too_short_says_how_long_it_must_be() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="use at least 61"):
        LANGUAGE.document(rng, 60, *LANGUAGE.pairs(rng, 10))


def test_more_keys_than_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="only 128 exist"):
        LANGUAGE.pairs(np.random.default_rng(0), 129, key_len=1)
