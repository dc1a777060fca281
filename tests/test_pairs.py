"""Pairwise designs of cases."""

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


def test_values_of_factors_that_need_not_meet_come_once() -> None:
    factors = {"model": list(range(9)), "mode": list(range(8)), "store": ["x", "y"]}
    cases = pairwise(factors, meet=[("model", "store")])
    assert len(cases) == 18
    assert pairs_of(full_product({name: factors[name] for name in ("model", "store")})) <= (
        pairs_of(cases)
    )
    alone = pairwise(factors, meet=[])
    assert len(alone) == 9
    assert [len({case[name] for case in alone}) for name in factors] == [9, 8, 2]
