"""``hf-kvret bench launch``: its search checks and times candidates in turns; choices are used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import kernel_clock
import pytest
import torch
from bench_launch import Launch, TuneCase, label, search

from hf_kvret_kernels import tuning
from hf_kvret_kernels._dispatch import interpreted


class Clock:
    """Seconds by choice instead of a clock; notes what would be timed."""

    def __init__(self, seconds: Callable[[Mapping[str, str]], float]) -> None:
        self.seconds, self.turns = seconds, []

    def __call__(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        self.turns.append(list(calls))
        # An outlier does no harm to a median.
        return {name: [self.seconds(self.fields(name)), 1e9, 0.0] for name in calls}

    @staticmethod
    def fields(name: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\w+)", name))


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
    result = search(case(), clock)
    assert result.best == Choice("far", 64, 8)
    assert (result.rule_seconds, result.best_seconds) == (1.0, pytest.approx(0.34))
    assert result.worth_it and result.ratio == pytest.approx(1 / 0.34)
    # All rivals of a turn are timed together, and the last turn is the rule against the best.
    assert clock.turns[0] == [label(RULE), label(replace(RULE, way="far"))]
    assert clock.turns[-1] == [label(RULE), label(result.best)]
    # An option that counts on one way only is not tried on the other.
    near = [name for turn in clock.turns[:2] for name in turn if "near" in name]
    assert near and all("warps=4" in name for name in near)


@pytest.mark.parametrize(("gain", "taken"), [(0.04, False), (0.06, True)])
def test_the_rule_stays_unless_it_is_beaten_by_the_margin(gain: float, taken: bool) -> None:
    result = search(
        case(), Clock(lambda fields: 1.0 if fields["block"] == "32" else 1 / (1 + gain))
    )
    assert result.best.block != 32
    assert result.worth_it is taken


def test_the_least_of_noisy_times_is_measured_again() -> None:
    seen: set[str] = set()

    def lucky_once(fields: Mapping[str, str]) -> float:
        first = str(fields) not in seen and fields["block"] == "64"
        seen.add(str(fields))
        return 0.5 if first else 1.0

    result = search(case(), Clock(lucky_once))
    assert result.best_seconds == 1.0
    assert not result.worth_it


def test_wrong_and_failing_candidates_are_told_and_never_timed() -> None:
    def run(choice: Choice) -> torch.Tensor:
        if choice.block == 64:
            raise RuntimeError("out of resource: shared memory\nmore lines")
        out = torch.ones(2, 4)
        if choice.way == "far":
            out[1, 2] = 1.5 if choice.block == 16 else float("nan")
        return out

    clock = Clock(lambda fields: 1.0 if fields["block"] == "32" else 0.1)
    result = search(case(run), clock)
    assert result.best == replace(RULE, block=16)
    assert not [name for turn in clock.turns for name in turn if "far" in name or "=64" in name]
    reasons = result.refused
    assert reasons[label(replace(RULE, block=64))] == "RuntimeError: out of resource: shared memory"
    assert reasons[label(replace(RULE, way="far"))].startswith("differs by inf from the rule")
    assert "allowed are 1.0e-03" in reasons[label(Choice("far", 16, 4))]
    assert result.timed == {label(RULE): 1.0, label(result.best): 0.1}


Run = Callable[..., int]
SMALL = ["--heads=1", "--group=2", "--head-dim=16", "--cold=64", "--repeats=3", "--batch=1"]
needs_interpreter = pytest.mark.skipif(not interpreted(), reason="tunes for the interpreter")
pytest.importorskip("triton", reason="what is tuned are Triton kernels")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that is written, of this test alone; clocks and buffers are small."""
    monkeypatch.setenv("HF_KVRET_TUNING", str(tmp_path / "mine"))
    monkeypatch.setattr(kernel_clock, "_CPU_FLUSH_BYTES", 1 << 12)
    tuning.reload()
    yield tmp_path / "mine" / "interpreter.json"
    tuning.reload()


def small_blocks(fields: Mapping[str, str]) -> float:
    """A machine that likes small tiles: only gather_attention is slower by it."""
    block = int(fields.get("block_k", fields.get("block_n", "0")))
    return 1.0 + block if "variant" not in fields else 1.0


@pytest.fixture
def small_blocks_win(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(small_blocks)
    monkeypatch.setattr(Launch, "_timer", clock)
    return clock


@pytest.fixture
def measure(bench: Run) -> Run:
    return partial(bench, "launch", *SMALL)


@needs_interpreter
def test_choices_are_written_read_back_and_used(
    mine: Path,
    tmp_path: Path,
    small_blocks_win: Clock,
    capsys: pytest.CaptureFixture[str],
    measure: Run,
) -> None:
    from hf_kvret_kernels.gather_scores import triton as scoring

    size = scoring.ScoresSize("bfloat16", 16, 2, 1, 32, "device")
    rule = scoring.rule(size)
    # Looked up before, so that the run has to make the process read again.
    assert tuning.choice(scoring.CHOICES, size, rule, torch.device("cpu")) is rule
    files = ["--json", str(tmp_path / "t.json"), "--table", str(tmp_path / "t.md")]
    assert measure("--context", "32", *files) == 0
    taken = tuning.choice(scoring.CHOICES, size, rule, torch.device("cpu"))
    assert taken == replace(rule, block_k=16) != rule
    entries = {
        (entry["op"], entry["size"].get("masked")): entry
        for entry in json.loads(mine.read_text())["entries"]
    }
    assert set(entries) == {
        ("gather_attention", None),
        ("gather_scores", None),
        ("prompt_attention", False),
        ("prompt_attention", True),
    }
    assert entries["gather_attention", None]["choice"] is None
    assert entries["prompt_attention", True]["choice"]["block_n"] == 16
    measured = entries["gather_scores", None]["measured"]
    assert measured["ratio"] == pytest.approx((1 + rule.block_k) / 17) and measured["repeats"] == 3
    out = capsys.readouterr().out
    assert f"take their numbers from {mine}" in out
    assert "say nothing about a GPU" in out
    table = (tmp_path / "t.md").read_text()
    line = next(line for line in table.splitlines() if "gather_scores" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["gather_scores", "32", "1", "device"]
    assert cells[7:9] == ["best", "block_k=16"] and cells[9] == "-" and cells[11] == "0"
    line = next(line for line in table.splitlines() if "gather_attention" in line)
    assert "direct 1000, gather 1000" in line


@needs_interpreter
def test_a_dry_run_writes_nothing_and_finished_sizes_are_kept(
    mine: Path,
    tmp_path: Path,
    small_blocks_win: Clock,
    capsys: pytest.CaptureFixture[str],
    measure: Run,
) -> None:
    arguments = ["--ops", "gather_scores", "--json", str(tmp_path / "t.json")]
    assert measure("--context", "8", *arguments, "--dry-run") == 0
    assert not mine.parent.exists()
    assert f"dry run: {mine} is as it was" in capsys.readouterr().out
    timed = len(small_blocks_win.turns)
    assert measure("--context", "8", *arguments) == 0
    assert len(small_blocks_win.turns) == timed
    assert json.loads(mine.read_text())["entries"][0]["choice"]["block_k"] == 16
    assert measure("--context", "8,32", *arguments) == 0
    assert len(small_blocks_win.turns) > timed
    assert len(json.loads(mine.read_text())["entries"]) == 2


def test_a_cpu_has_nothing_to_tune(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = refused("launch", *SMALL)
    assert "nothing to tune" in message and "run this with --device cuda" in message.lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "matmul"], "--ops: unknown: matmul; choose among gather_attention"),
        (["--ops", "gather_scores,gather_scores"], "name each once"),
        (["--ops", ","], "--ops: none is named"),
        (["--context", "128"], "--context 128 with --cold 64"),
        (["--rows", "host"], "--rows host with --device cpu: choose of device"),
        (["--rows", "device,device"], "name each once"),
        (["--group", "128"], "--group 128: prompt_attention looks up"),
        (["--repeats", "0"], "--repeats: '0' is no whole number from 1"),
        (["--head-dim", "0"], "--head-dim: '0' is no whole number from 1"),
    ],
)
def test_mistakes_are_named_before_the_work(
    mine: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[..., str],
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert message in refused("launch", *SMALL, "--context", "8", *arguments)
    assert not mine.exists()
