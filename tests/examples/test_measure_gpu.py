"""The plan for a GPU: its commands parse, its page lists them, limits and budget are kept."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

import measure_gpu
import pytest

from hf_kvret import cli
from hf_kvret.lab.bench.opponents import choose_bench_caches
from hf_kvret.lab.program.arguments import names
from hf_kvret.lab.program.scripts import load_measurement, script_parser

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "h200.md"
OUT = Path("docs/results")
# Opponents of which a package may be missing here.
OPTIONAL = ("quantized", "kvpress")


def parsed(words: list[str]) -> argparse.Namespace:
    """What the program, or the script that it runs, makes of a command."""
    options = cli.make_parser().parse_args(words)
    if not hasattr(options, "given"):
        return options
    return script_parser(load_measurement(" ".join(words[:2]))).parse_args(options.given)


def listed() -> list[str]:
    """The commands on the page, one a line."""
    return re.findall(r"^    (hf-kvret .+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_lists_the_commands_of_the_plan() -> None:
    assert listed() == [f"hf-kvret {shlex.join(part.command(OUT))}" for part in measure_gpu.PLAN]
    parts = re.findall(r"^### (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert parts == [part.name for part in measure_gpu.PLAN]


@pytest.mark.parametrize("command", listed())
def test_a_command_on_the_page_parses(command: str) -> None:
    options = parsed(shlex.split(command)[1:])
    assert options.device == "cuda" and options.json.parent == OUT
    for text in names(getattr(options, "caches", "")):
        if text.partition(":")[0] not in OPTIONAL:
            choose_bench_caches([text], {"store": "device"}, "cuda")


def test_tiny_commands_parse_and_name_no_cache_that_needs_cuda() -> None:
    for part in measure_gpu.PLAN:
        options = parsed(part.command(OUT, tiny=True))
        assert options.device == "cpu" and options.json.name == f"tiny_{part.name}.json"
        for text in names(getattr(options, "caches", "")):
            if text.partition(":")[0] not in (*OPTIONAL, "offloaded"):
                choose_bench_caches([text], {"store": "device"}, "cpu")


def test_all_five_methods_are_measured_side_by_side() -> None:
    (part,) = (part for part in measure_gpu.PLAN if part.name == "methods")
    for tiny in (False, True):
        caches = names(parsed(part.command(OUT, tiny)).caches)
        methods = [text.partition(":")[0] for text in caches]
        assert methods == ["paris", "lrqk", "ctkvr", "a2ats", "aqua", "dense"]
        assert all("dense_below=0" in text for text in caches[:5]) == tiny


def test_a_part_that_is_done_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, float]] = []

    def pretend(part: object, out: Path, tiny: bool, seconds: float) -> tuple[str, float]:
        ran.append((part.name, seconds))
        return ("failed: no", 5.0) if part.name == "decode_512k" else ("done", 100.0)

    monkeypatch.setattr(measure_gpu, "run_part", pretend)
    parts = list(measure_gpu.PLAN[1:5])
    states = [row[1] for row in measure_gpu.measure(parts, tmp_path, True, 234.5)]
    # 420, 300 and 500 seconds are their own limits; 29.5 are too few for the fourth.
    assert ran == [("decode", 234.5), ("decode_512k", 134.5), ("decode_1m", 129.5)]
    assert states == ["done", "failed: no", "done", "not begun: the budget is spent"]
    ran.clear()
    states = [row[1] for row in measure_gpu.measure(parts, tmp_path, True, 10_000)]
    assert ran == [("decode_512k", 300), ("batch", 580)]
    assert states == ["done before", "failed: no", "done before", "done"]
    # Another command is another measurement.
    ran.clear()
    measure_gpu.measure(parts[:1], tmp_path, False, 10_000)
    assert [name for name, _ in ran] == ["decode"]


def test_a_command_that_takes_too_long_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    # Python, since a shell in the background hands on that interrupts are ignored.
    heeds = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    slow.write_text(f"#!{sys.executable}\n{heeds}\ntime.sleep(60)\n")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho begins\necho 'hf-kvret: error: no such thing'\nexit 2\n")
    for script in (slow, broken):
        script.chmod(0o755)
    monkeypatch.setattr(measure_gpu.sys, "executable", str(slow))
    ended, took = measure_gpu.run_part(measure_gpu.PLAN[0], tmp_path, True, 3)
    assert ended.startswith("interrupted after") and took < 20
    monkeypatch.setattr(measure_gpu.sys, "executable", str(broken))
    ended, _ = measure_gpu.run_part(measure_gpu.PLAN[0], tmp_path, True, 60)
    assert ended == "failed: hf-kvret: error: no such thing"


def test_launch_numbers_are_found_first_and_kept_below_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_gpu.PLAN[0].name == "launch"
    script = tmp_path / "says"
    script.write_text('#!/bin/sh\necho "$HF_KVRET_TUNING"\n')
    script.chmod(0o755)
    monkeypatch.setattr(measure_gpu.sys, "executable", str(script))
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    assert measure_gpu.run_part(measure_gpu.PLAN[1], Path("results"), True, 60)[0] == "done"
    folder = Path("results", "decode.log").read_text().strip()
    assert folder == str(tmp_path / "results" / "tuning")


@pytest.mark.slow
def test_a_part_runs_with_the_tiny_shape(tmp_path: Path) -> None:
    part = next(part for part in measure_gpu.PLAN if part.name == "lrqk")
    assert measure_gpu.run_part(part, tmp_path, True, 300)[0] == "done"
    assert (tmp_path / "tiny_lrqk.json").is_file()
