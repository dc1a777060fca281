"""Pairwise designs of cases."""

from __future__ import annotations

from typing import Any

import pytest

from .pairs import full_product, pairs_of, pairwise


@pytest.mark.parametrize("sizes", [(1,), (4, 4), (2, 5, 3), (7, 6, 5, 4, 3), (1, 1, 9)])
def test_every_pair_is_covered_by_few_cases(sizes: tuple[int, ...]) -> None:
    factors = {f"factor {n}": list(range(size)) for n, size in enumerate(sizes)}
    cases = pairwise(factors)
    assert pairs_of(cases) == pairs_of(full_product(factors))
    assert all(list(case) == list(factors) for case in cases)
    longest = sorted((*sizes, 1))[-2:]
    assert len(cases) <= max(1.3 * longest[0] * longest[1], 1)


def test_cases_that_are_not_allowed_are_left_out_and_no_other() -> None:
    factors = {"row": ["a", "b", "c"], "column": [1, 2, 3], "place": ["x", "y"]}

    def allowed(case: dict[str, Any]) -> bool:
        return not (case.get("row") == "a" and case.get("place") == "y")

    cases = pairwise(factors, allowed)
    assert all(allowed(case) for case in cases)
    assert pairs_of(cases) == pairs_of(filter(allowed, full_product(factors)))


def test_values_of_two_factors_that_are_apart_need_not_all_meet() -> None:
    factors = {"model": list(range(9)), "mode": list(range(8)), "store": ["x", "y"]}
    cases = pairwise(factors, apart=[("mode", "model")])
    assert len(cases) < 9 * 8 / 2
    whole = full_product(factors)
    wanted = {pair for pair in pairs_of(whole) if "store" in dict(pair)}
    assert wanted <= pairs_of(cases)


def test_a_factor_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="factors without values: b"):
        pairwise({"a": [1], "b": []})
