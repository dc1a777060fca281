"""Pairwise designs of cases."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from .pairs import full_product, pairs_of, pairwise


@pytest.mark.parametrize("sizes", [(1,), (3,), (4, 4), (2, 5, 3), (7, 6, 5, 4, 3), (1, 1, 9)])
def test_every_pair_is_covered_by_few_cases(sizes: tuple[int, ...]) -> None:
    factors = {f"factor {n}": list(range(size)) for n, size in enumerate(sizes)}
    cases = pairwise(factors)
    whole = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    assert pairs_of(cases) == pairs_of(whole)
    assert all(list(case) == list(factors) for case in cases)
    longest = sorted((*sizes, 1))[-2:]
    assert len(cases) <= max(1.3 * longest[0] * longest[1], 1)


def test_what_is_not_allowed_is_in_no_case_and_all_else_is() -> None:
    factors = {"row": ["a", "b", "c"], "column": [1, 2, 3], "place": ["x", "y"]}

    def allowed(case: dict[str, Any]) -> bool:
        return not (case.get("row") == "a" and case.get("place") == "y")

    cases = pairwise(factors, allowed)
    assert all(allowed(case) for case in cases)
    whole = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    assert pairs_of(cases) == pairs_of(filter(allowed, whole))


def test_the_same_arguments_give_the_same_cases() -> None:
    factors = {name: list(range(4)) for name in "abcd"}
    assert pairwise(factors) == pairwise(factors)


def test_no_pair_twice_where_two_factors_are_all() -> None:
    cases = pairwise({"a": [1, 2], "b": [3, 4]})
    assert len(cases) == 4 == len(list(combinations(range(4), 2))) - 2


def test_a_factor_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="factors without values: b"):
        pairwise({"a": [1], "b": []})


def test_none_is_a_value_like_others() -> None:
    factors = {"one": [None, 1, 2], "other": [None, "x"], "third": [None, True]}
    covered = pairs_of(pairwise(factors))
    assert covered == pairs_of(full_product(factors))
