"""The search of ``bench_launch.py``: candidates are checked, timed in turns, kept by a margin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from bench_launch import TuneCase, label, search
from tune_clock import Clock

from hf_kvret_kernels import tuning

pytest.importorskip("triton", reason="what is tuned are Triton kernels")


class Size(NamedTuple):
    tokens: int


@dataclass(frozen=True)
class Choice:
    way: str
    block: int
    warps: int


TOY = tuning.Tunable(
    "toy",
    1,
    Size,
    Choice,
    {"way": ("near", "far"), "block": (16, 32, 64), "warps": (2, 4, 8)},
    only={"warps": ("way", "far")},
)
RULE = Choice("near", 32, 4)


def case(run: Callable[[Choice], torch.Tensor] | None = None) -> TuneCase:
    def right(choice: Choice) -> torch.Tensor:
        return torch.ones(2, 4)

    launch = run or right
    return TuneCase(TOY, Size(8), RULE, lambda choice: (launch(choice),), 1e-3)


def test_the_quickest_is_found_although_fields_depend_on_each_other() -> None:
    def seconds(fields: Mapping[str, str]) -> float:
        # "far" pays only with a block of 64, and 8 warps only there.
        far = {"16": 3.0, "32": 1.2, "64": 0.5}[fields["block"]] - 0.02 * int(fields["warps"])
        return far if fields["way"] == "far" else {"16": 1.1, "32": 1.0, "64": 0.9}[fields["block"]]

    clock = Clock(seconds)
    found = search(case(), clock)
    assert found.best == Choice("far", 64, 8)
    assert (found.rule_seconds, found.best_seconds) == (1.0, pytest.approx(0.34))
    assert found.worth_it and found.ratio == pytest.approx(1 / 0.34)
    # All rivals of a turn are timed together, and the last turn is the rule against the best.
    assert clock.turns[0] == [label(RULE), label(replace(RULE, way="far"))]
    assert clock.turns[-1] == [label(RULE), label(found.best)]
    # What only counts on one way is not tried on the other.
    near = [name for turn in clock.turns[:2] for name in turn if "near" in name]
    assert near and all("warps=4" in name for name in near)


@pytest.mark.parametrize(("gain", "taken"), [(0.04, False), (0.06, True)])
def test_the_rule_stays_unless_it_is_beaten_by_the_margin(gain: float, taken: bool) -> None:
    found = search(case(), Clock(lambda fields: 1.0 if fields["block"] == "32" else 1 / (1 + gain)))
    assert found.best.block != 32
    assert found.worth_it is taken


def test_the_least_of_noisy_times_is_measured_again() -> None:
    seen: set[str] = set()

    def lucky_once(fields: Mapping[str, str]) -> float:
        first = str(fields) not in seen and fields["block"] == "64"
        seen.add(str(fields))
        return 0.5 if first else 1.0

    found = search(case(), Clock(lucky_once))
    assert found.best_seconds == 1.0
    assert not found.worth_it


def test_wrong_and_failing_candidates_are_told_and_never_timed() -> None:
    def run(choice: Choice) -> torch.Tensor:
        if choice.block == 64:
            raise RuntimeError("out of resource: shared memory\nmore lines")
        out = torch.ones(2, 4)
        if choice.way == "far":
            out[1, 2] = 1.5 if choice.block == 16 else float("nan")
        return out

    clock = Clock(lambda fields: 1.0 if fields["block"] == "32" else 0.1)
    found = search(case(run), clock)
    assert found.best == replace(RULE, block=16)
    assert not [name for turn in clock.turns for name in turn if "far" in name or "=64" in name]
    told = found.refused
    assert told[label(replace(RULE, block=64))] == "RuntimeError: out of resource: shared memory"
    assert told[label(replace(RULE, way="far"))].startswith("differs by inf from the rule")
    assert "allowed are 1.0e-03" in told[label(Choice("far", 16, 4))]
    assert found.timed == {label(RULE): 1.0, label(found.best): 0.1}
