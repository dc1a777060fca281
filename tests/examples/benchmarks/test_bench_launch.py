"""``hf-kvret bench launch``: candidates are checked, timed in turns, kept by a margin, and used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import kernel_clock
import pytest
import torch
from bench_launch import Launch
from tune_clock import Clock

from hf_kvret_kernels import tuning
from hf_kvret_kernels._dispatch import interpreted

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
    told = entries["gather_scores", None]["measured"]
    assert told["ratio"] == pytest.approx((1 + rule.block_k) / 17) and told["repeats"] == 3
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
    told = refused("launch", *SMALL)
    assert "nothing to tune" in told and "run this with --device cuda" in told.lower()


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
