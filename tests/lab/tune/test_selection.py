"""Choice, front and who runs on, from measurements that are given."""

from __future__ import annotations

import math

import pytest

from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.results import Results
from hf_kvret.lab.tune.selection import (
    Choice,
    Measured,
    beats,
    choose,
    finalists,
    front,
    standing,
    still_running,
)
from hf_kvret.lab.tune.table import tuning_text


def row(equal: int, step_bytes: int, ms: float = 1.0, tokens: int = 100) -> Row:
    sums = {"kl": 0.1 * tokens, "kl_squares": 0.02 * tokens}
    sizes = {"step_bytes": step_bytes, "device_bytes": 0}
    return {"tokens": tokens, "equal": equal, **sizes, "ms": ms, **sums}


def variant(name: str, *equal: int, bytes: int, ms: float = 1.0) -> Measured:
    return Measured(name, tuple(row(one, bytes, ms) for one in equal))


def test_means_and_errors_are_those_of_the_textbook() -> None:
    one = Measured("a", (row(90, 10), row(30, 40, ms=3.0, tokens=50)))
    assert one.tokens == 150 and one.agreement == 0.8
    share = 120.5 / 151
    assert one.agreement_error == pytest.approx(math.sqrt(share * (1 - share) / 150))
    # Values with mean 0.1 and mean square 0.02: variance 0.01 over n, n - 1 in the sample.
    assert one.kl == pytest.approx(0.1)
    assert one.kl_error == pytest.approx(math.sqrt(0.01 * 150 / 149 / 150))
    assert one.cost == (25, 2.0)
    assert Measured("b", (row(1, 1, tokens=1),)).kl_error == 0


def test_windows_that_differ_more_than_their_tokens_make_errors_larger() -> None:
    shares = (60, 100, 60, 100)
    apart = variant("a", *shares, bytes=1)
    # Around 80 by 20: a variance of 1,600 / 3 in the sample.
    assert apart.agreement_error == pytest.approx(0.01 * math.sqrt(1600 / 3 / 4))
    alike = variant("a", 80, 80, 80, 80, bytes=1)
    assert alike.agreement_error < 0.25 * apart.agreement_error
    # Three windows tell little of what the next one brings.
    assert variant("a", 60, 100, 80, bytes=1).agreement_error < 0.025
    rows = [row(80, 1) | {"kl": kl, "kl_squares": 2.0} for kl in (0.0, 20.0, 0.0, 20.0)]
    assert Measured("a", tuple(rows)).kl_error == pytest.approx(0.1 / math.sqrt(3))


def test_the_cheapest_with_an_error_to_spare_is_chosen() -> None:
    # Of 100 tokens, 97 have an error of 0.018 and 99 one of 0.012.
    measured = [
        variant("sure", 99, bytes=30),
        variant("surer", 100, bytes=40),
        variant("mean", 96, bytes=20),
        variant("short", 80, bytes=10),
    ]
    for first, name, certainty in (
        (0, "sure", "sure"),
        (2, "mean", "mean"),
        (3, "short", "missed"),
    ):
        choice = choose(measured[first:], 0.95)
        assert (choice.variant and choice.variant.name, choice.certainty) == (name, certainty)
    assert choose([], 0.95).variant is None


def test_time_decides_where_bytes_are_equal_and_the_first_is_the_best_of_equals() -> None:
    slow, quick = variant("slow", 99, bytes=5, ms=2.0), variant("quick", 99, bytes=5)
    assert choose([slow, quick], 0.9).variant is quick
    assert choose([slow, quick], 0.999).variant is quick


def test_of_variants_that_cost_the_same_the_best_is_chosen() -> None:
    # A little slower, within what times are worth.
    worse, better = variant("worse", 97, bytes=5), variant("better", 100, bytes=5, ms=1.001)
    assert choose([worse, better], 0.9).variant is better
    assert front([worse, better]) == [better]
    nearer = Measured("nearer", (row(97, 5, ms=1.001) | {"kl": 0.01},))
    assert choose([worse, nearer], 0.9).variant is nearer
    slower = Measured("slower", (row(97, 5, ms=1.2) | {"kl": 0.01},))
    assert choose([worse, slower], 0.9).variant is worse


def _results(rows: dict[tuple[str, int], Row], windows: int = 2, variants: int = 4) -> Results:
    setup = {"windows": windows, "agreement": 0.95, "variants": variants}
    results = Results("tune", setup)
    for window in range(windows):
        results.add({"cache": "full", "window": window}, row(100, 99))
    for (name, window), one in rows.items():
        results.add({"cache": name, "window": window}, one)
    return results


def test_finalists_are_known_when_the_last_window_is_over() -> None:
    # 60 of 100 tokens are far below 95, and what is dearer than the sure one is out, too.
    shares = {"low": 60, "near": 94, "other": 95, "high": 96}
    rows = {(name, 0): row(share, number) for number, (name, share) in enumerate(shares.items())}
    assert finalists(_results(rows, variants=5)) is None
    assert standing(_results(rows), list(shares)) == (1, ["near", "other", "high"])
    for name in ("near", "other", "high"):
        assert finalists(_results(rows)) is None
        rows[name, 1] = row(95, 1)
    last = finalists(_results(rows))
    assert last is not None and [one.name for one in last] == ["near", "other", "high"]
    # A variant that did not fit into memory is out, at whichever time.
    rows["near", 1] = {"out_of_memory": "no room"}
    last = finalists(_results(rows))
    assert last is not None and [one.name for one in last] == ["other", "high"]


def test_what_was_left_out_as_dearer_follows_where_all_others_miss() -> None:
    """A window was kind to the cheap one, before which the dear one stopped."""
    names = ["low", "cheap", "dear"]
    rows = {("low", 0): row(60, 1), ("cheap", 0): row(400, 2, tokens=400), ("dear", 0): row(99, 3)}
    assert standing(_results(rows, variants=3), names) == (1, ["cheap"])
    rows["cheap", 1] = row(300, 2, tokens=400)
    assert standing(_results(rows, variants=3), names) == (1, ["cheap", "dear"])
    assert finalists(_results(rows, variants=3)) is None
    rows["dear", 1] = row(99, 3)
    last = finalists(_results(rows, variants=3))
    assert last is not None and choose(last, 0.95) == Choice(last[1], "sure")
    assert last[1].name == "dear"


def test_the_front_is_what_nothing_beats() -> None:
    measured = [
        variant("best", 99, bytes=40, ms=4.0),
        variant("cheap", 80, bytes=10, ms=4.0),
        variant("beaten", 80, bytes=11, ms=4.0),
        variant("quick", 80, bytes=50, ms=1.0),
        variant("hardly quicker", 99, bytes=41, ms=3.9),
    ]
    assert [one.name for one in front(measured)] == ["cheap", "best", "quick"]
    alike = [variant("a", 90, bytes=1), variant("b", 90, bytes=1, ms=1.04)]
    assert len(front(alike)) == 2
    slow = variant("slow", 90, bytes=1, ms=1.2)
    assert beats(alike[0], slow) and not beats(slow, alike[0])


def test_variants_run_while_they_may_be_chosen() -> None:
    ladder = [
        variant(f"top_k={place}", equal, equal, equal, equal, bytes=place)
        for place, equal in enumerate((50, 60, 88, 90, 93, 96, 99, 99))
    ]
    # Four hundred tokens around 90 have an error of 1.5: 96 is sure.
    running = [f"top_k={place}" for place in range(2, 6)]
    assert still_running(ladder, 0.9) == running
    # Nothing is sure yet for the same shares of fewer tokens.
    assert still_running([one.on(1) for one in ladder], 0.9) == [*running, "top_k=6", "top_k=7"]


def test_the_best_runs_on_where_all_are_far_below() -> None:
    low = [variant(str(equal), equal, bytes=equal) for equal in range(10, 26)]
    assert still_running(low, 0.99) == ["25"]
    assert still_running([], 0.9) == []


def test_a_choice_that_was_beaten_on_fewer_tokens_stands_in_the_table() -> None:
    rows = {("long", 0): row(94, 10), ("long", 1): row(100, 10), ("short", 0): row(95, 9)}
    assert "Not finished" in tuning_text(_results(rows, variants=2))
    rows["short", 1] = {"out_of_memory": "no room"}
    rows = {cell: one | {"method": "flat", "cache_config": {}} for cell, one in rows.items()}
    text = tuning_text(_results(rows, variants=2))
    assert "| **long**" in text and "| short " in text and "Out of memory: short" in text
