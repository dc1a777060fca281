"""New tokens that a call of ``generate`` is expected to make: what is sure, and some of a limit."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from hf_kvret.attention.allowance import LEAST, expected_new_tokens


@pytest.mark.parametrize(
    ("limits", "context_len", "expected"),
    [
        ({"max_new_tokens": 100}, 30, 100),
        ({"max_new_tokens": 100}, 30_000, 100),
        ({"max_new_tokens": LEAST}, 30, LEAST),
        ({"max_new_tokens": LEAST + 1}, 30, LEAST),
        ({"max_new_tokens": 10**6}, 0, LEAST),
        ({"max_new_tokens": 10**6}, 30_000, 30_000),
        ({"max_length": 500}, 480, 20),
        ({"max_length": 480}, 480, 0),
        ({"max_length": 10**6}, 480, LEAST),
        ({"max_length": 10**6}, 30_000, 30_000),
        ({"max_new_tokens": 10**6, "min_new_tokens": 50_000}, 480, 50_000),
        ({"max_new_tokens": 10**6, "min_length": 50_000}, 480, 50_000 - 480),
        ({"max_new_tokens": 100, "min_new_tokens": 5}, 480, 100),
        ({}, 480, 0),
    ],
)
def test_new_tokens_are_those_that_are_sure_or_as_many_as_the_context(
    limits: dict[str, int], context_len: int, expected: int
) -> None:
    assert expected_new_tokens(GenerationConfig(**limits), context_len) == expected
