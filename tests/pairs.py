"""Pairwise designs: few cases in which any two values of two factors meet at least once."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Name = Hashable
Case = dict[Any, Any]
Pair = frozenset[tuple[Name, Hashable]]
Allowed = Callable[[Case], bool]


def pairwise(
    factors: Mapping[Any, Sequence[Hashable]],
    allowed: Allowed = lambda case: True,
    meet: Iterable[tuple[Any, Any]] | None = None,
) -> list[Case]:
    """Cases, each with a value for every factor, that cover all pairs of values of two factors.

    About as many as the two longest factors have pairs, where the full product has as many as all
    factors together. The same arguments give the same cases. A pair that no case may have is left
    out. Each value is in some case, also where it need meet no other.

    Args:
        factors: values by name of the factor, each at least one.
        allowed: whether there may be a case; called with the values of some factors, or of all.
        meet: two factors each whose values all meet; None: those of any two.
    """
    # Longest first: the first two decide how many cases there are.
    names = sorted(factors, key=lambda name: -len(factors[name]))
    missing = {
        frozenset(pair.items())
        for one, other in (combinations(names, 2) if meet is None else meet)
        for pair in full_product({one: factors[one], other: factors[other]})
        if allowed(pair)
    }
    used: Counter[tuple[Name, Hashable]] = Counter()
    cases: list[Case] = []
    for start in full_product({name: factors[name] for name in names[:2]}):
        if frozenset(start.items()) in missing or len(names) == 1:
            _add(cases, _completed(start, names, factors, allowed, missing, used), missing, used)
    for pair in sorted(missing, key=lambda pair: sorted(map(str, pair))):
        # A case made for another pair may have covered this one.
        if pair in missing:
            _add(
                cases, _completed(dict(pair), names, factors, allowed, missing, used), missing, used
            )
    for start in ({name: value} for name in names for value in factors[name]):
        (value,) = start.items()
        if not used[value] and allowed(start):
            _add(cases, _completed(start, names, factors, allowed, missing, used), missing, used)
    return [{name: case[name] for name in factors} for case in cases]


def pairs_of(cases: Iterable[Case]) -> set[Pair]:
    """Every two ``(factor, value)`` that meet in one of ``cases``."""
    return {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}


def full_product(factors: Mapping[Any, Sequence[Hashable]]) -> list[Case]:
    """Every case: each value of a factor with each of every other."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def _completed(
    start: Case,
    names: Sequence[Name],
    factors: Mapping[Any, Sequence[Hashable]],
    allowed: Allowed,
    missing: set[Pair],
    used: Counter[tuple[Name, Hashable]],
) -> Case | None:
    """``start`` with values for the other factors that meet the most of ``missing``.

    Of equal values those that were used least. None where no value of some factor is allowed.
    """
    case = dict(start)
    for name in names:
        if name in case:
            continue
        values = [value for value in factors[name] if allowed(case | {name: value})]
        if not values:
            return None
        case[name] = max(
            values,
            key=lambda value: (
                sum(frozenset({(name, value), met}) in missing for met in case.items()),
                -used[name, value],
            ),
        )
    return case


def _add(
    cases: list[Case], case: Case | None, missing: set[Pair], used: Counter[tuple[Name, Hashable]]
) -> None:
    if case is not None:
        cases.append(case)
        used.update(case.items())
        missing -= pairs_of([case])
