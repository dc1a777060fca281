"""How many tokens a round drafts."""

from typing import Any

import pytest

from hf_kvret.lossless.pace import FastestPace, GivenPace


def pace_after(
    rounds: int, accepted: float, step_s: float, exact_s: float, query_s: float = 0.0
) -> FastestPace:
    """After rounds of which a share of drafts is accepted, up to the first wrong one."""
    pace = FastestPace()
    for _ in range(rounds):
        count = pace.count(32)
        good = int(accepted * count)
        pace.learn(count, good, count * step_s, exact_s + count * query_s)
    return pace


def test_dear_exact_passes_and_good_drafts_make_long_rounds() -> None:
    assert pace_after(12, 1.0, step_s=1.0, exact_s=10.0).count(32) == 31


def test_bad_drafts_make_exact_steps() -> None:
    assert pace_after(12, 0.0, step_s=1.0, exact_s=1.5).count(32) == 0


def test_drafts_that_cost_as_much_as_exact_steps_are_not_made() -> None:
    assert pace_after(12, 1.0, step_s=1.0, exact_s=1.0, query_s=1.0).count(32) == 0


def test_drafts_are_tried_again_after_a_while() -> None:
    pace = pace_after(12, 0.0, step_s=1.0, exact_s=1.5)
    counts = [pace.count(32) for _ in range(40)]
    assert 0 < sum(count > 0 for count in counts) <= 2


@pytest.mark.parametrize("most", [0, 1, 3, 32])
def test_no_more_are_drafted_than_asked_for(most: int) -> None:
    for pace in (FastestPace(), pace_after(9, 1.0, 1.0, 10.0), GivenPace(20, None)):
        assert pace.count(most) <= most


@pytest.mark.parametrize("count", [-1, 2.5, float("inf"), float("nan"), None, "a"])
def test_a_given_number_is_one(count: Any) -> None:
    with pytest.raises(ValueError, match="num_assistant_tokens="):
        GivenPace(count, None)
    assert GivenPace(7.0, None).count(9) == 7


def test_a_given_number_follows_the_schedule() -> None:
    pace = GivenPace(5, "heuristic")
    pace.learn(5, 5, 1.0, 1.0)
    assert pace.count(32) == 7
    pace.learn(7, 2, 1.0, 1.0)
    assert pace.count(32) == 6
    constant = GivenPace(5, "constant")
    constant.learn(5, 5, 1.0, 1.0)
    assert constant.count(32) == 5
