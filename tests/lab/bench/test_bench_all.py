"""``bench all``: its commands parse, its page is made of results, limits and budget are kept."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from hf_kvret import cli
from hf_kvret.lab.bench import everything
from hf_kvret.lab.bench.everything import PLAN, Command, chosen_parts
from hf_kvret.lab.bench.opponents import choose_bench_caches
from hf_kvret.lab.bench.parser import MEASUREMENTS
from hf_kvret.lab.program.arguments import names
from hf_kvret.lab.program.scripts import load_measurement, script_parser

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
OUT = Path("out")
# Opponents of which a package may be missing here.
OPTIONAL = ("quantized", "kvpress")


def parsed(words: list[str]) -> argparse.Namespace:
    """What the program, or the script that it runs, makes of a command."""
    options = cli.make_parser().parse_args(words)
    if not hasattr(options, "given"):
        return options
    return script_parser(load_measurement(" ".join(words[:2]))).parse_args(options.given)


@pytest.mark.parametrize("part", PLAN, ids=lambda part: part.name)
def test_a_command_parses(part: Command) -> None:
    options = parsed(part.command(OUT, "h200"))
    assert options.device == "cuda" and options.json == OUT / f"h200_{part.name}.json"
    for text in names(getattr(options, "caches", "")):
        if text.partition(":")[0] not in OPTIONAL:
            choose_bench_caches([text], {"store": "device"}, "cuda")


def test_tiny_commands_parse_and_name_no_cache_that_needs_cuda() -> None:
    for part in PLAN:
        options = parsed(part.command(OUT, "tiny", tiny=True))
        assert options.device == "cpu" and options.json.name == f"tiny_{part.name}.json"
        for text in names(getattr(options, "caches", "")):
            if text.partition(":")[0] not in (*OPTIONAL, "offloaded"):
                choose_bench_caches([text], {"store": "device"}, "cpu")


def test_all_five_methods_are_measured_side_by_side() -> None:
    (part,) = chosen_parts("methods")
    for tiny in (False, True):
        caches = names(parsed(part.command(OUT, "x", tiny)).caches)
        methods = [text.partition(":")[0] for text in caches]
        assert methods == ["paris", "lrqk", "ctkvr", "a2ats", "aqua", "dense"]
        assert all("dense_below=0" in text for text in caches[:5]) == tiny


def test_all_but_the_long_parts_end_within_half_an_hour() -> None:
    assert sum(part.seconds for part in chosen_parts(None)) <= 1800
    assert [part.name for part in chosen_parts(None, with_long=True)] == [one.name for one in PLAN]
    with pytest.raises(ValueError, match="--only decodes: choose of launch, decode, "):
        chosen_parts("decodes")


def test_the_commands_are_listed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "all", "--list", "--name", "x", "--only", "kvpress,decode"]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = [part.command(Path("results"), "x") for part in chosen_parts("decode,kvpress")]
    assert lines == [f"hf-kvret {shlex.join(command)}" for command in expected]


def test_a_part_that_is_done_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, float]] = []

    now = [0.0]

    def pretend(
        part: Command, out: Path, name: str, tiny: bool, seconds: float
    ) -> tuple[str, float]:
        ran.append((part.name, seconds))
        state, took = ("failed: no", 5.0) if part.name == "methods" else ("done", 100.0)
        now[0] += took
        return state, took

    monkeypatch.setattr(everything.time, "monotonic", lambda: now[0])

    monkeypatch.setattr(everything, "run_part", pretend)
    parts = list(PLAN[1:5])
    assert [part.seconds for part in parts] == [300, 300, 240, 120]
    states = [state for _, state in everything.measure(parts, tmp_path, "x", True, 234.5)]
    # Each has a limit of its own; 29.5 seconds are too few for the fourth.
    assert ran == [("decode", 234.5), ("methods", 134.5), ("batch", 129.5)]
    assert states == ["done", "failed: no", "done", "not begun: the budget is spent"]
    ran.clear()
    states = [state for _, state in everything.measure(parts, tmp_path, "x", True, 10_000)]
    assert ran == [("methods", 300), ("prefill", 120)]
    assert states == ["done before", "failed: no", "done before", "done"]
    # Another command is another measurement, and so is another name; OUT may be written anew.
    ran.clear()
    monkeypatch.chdir(tmp_path.parent)
    everything.measure(parts[:1], Path(tmp_path.name), "x", True, 10_000)
    assert not ran
    everything.measure(parts[:1], tmp_path, "y", True, 10_000)
    other = dataclasses.replace(parts[0], arguments="decode --context 1K")
    everything.measure([other], tmp_path, "x", True, 10_000)
    assert [name for name, _ in ran] == ["decode", "decode"]


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
    monkeypatch.setattr(everything.sys, "executable", str(slow))
    ended, took = everything.run_part(PLAN[0], tmp_path, "x", True, 3)
    assert ended.startswith("interrupted after") and took < 20
    monkeypatch.setattr(everything.sys, "executable", str(broken))
    ended, _ = everything.run_part(PLAN[0], tmp_path, "x", True, 60)
    assert ended == "failed: hf-kvret: error: no such thing"
    broken.write_text("#!/bin/sh\necho 'error: it needs quanto: pip install quanto'\nexit 2\n")
    ended, _ = everything.run_part(PLAN[0], tmp_path, "x", True, 60)
    assert ended == "left out: error: it needs quanto: pip install quanto"


def test_launch_numbers_come_first_and_are_kept_below_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PLAN[0].name == "launch"
    script = tmp_path / "says"
    script.write_text('#!/bin/sh\necho "$HF_KVRET_TUNING"\n')
    script.chmod(0o755)
    monkeypatch.setattr(everything.sys, "executable", str(script))
    monkeypatch.chdir(tmp_path)
    Path("results").mkdir()
    assert everything.run_part(PLAN[1], Path("results"), "x", True, 60)[0] == "done"
    folder = Path("results", "x_decode.log").read_text().strip()
    assert folder == str(tmp_path / "results" / "tuning")


def test_scripts_of_a_checkout_are_left_out_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everything, "FOLDER", tmp_path)
    missing = [part.name for part in PLAN if not part.is_there]
    assert missing == ["launch", "kernels"]
    (row,) = everything.measure(chosen_parts("launch"), tmp_path, "x", True, 100)
    assert row[1].startswith("left out: it is a script of the repository")


def test_the_page_has_the_tables_of_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (*RESULTS.glob("h200_*.json"), RESULTS / "h200.notes.txt"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = ["bench", "all", "--page-only", "--name", "h200", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    page = (tmp_path / "h200.md").read_text(encoding="utf-8")
    assert str(tmp_path / "h200.md") in capsys.readouterr().out
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == ["decode", "batch", "decode_32k"]
    assert re.search(r"^\| launch +\|.*\*\*not measured\*\*", page, re.MULTILINE)
    assert re.search(r"^\| decode +\|.*\| measured in part \|$", page, re.MULTILINE)
    assert "NVIDIA H200; Python" in page and "[h200_batch.json](h200_batch.json)" in page
    assert page.count("| paris:top_k=100") >= 3
    assert page == (RESULTS / "h200.md").read_text(encoding="utf-8"), "make it again"


def test_the_page_says_how_a_part_ended(tmp_path: Path) -> None:
    states = {"decode": "failed: no such thing", "batch": "done"}
    page = everything.write_page(tmp_path, "x", MEASUREMENTS, False, states).read_text()
    assert "**not measured** (failed: no such thing)" in page
    assert "(done)" not in page
    for part in PLAN[:2]:
        part.file(tmp_path, "x").write_bytes((RESULTS / "h200_decode.json").read_bytes())
    (tmp_path / "x.done").write_text(json.dumps({PLAN[0].name: PLAN[0].arguments}))
    page = everything.write_page(tmp_path, "x", MEASUREMENTS, False, {}).read_text()
    assert page.count("| measured  ") == 1 and page.count("| measured in part |") == 1


@pytest.mark.slow
def test_a_part_runs_with_the_tiny_shape(tmp_path: Path) -> None:
    (part,) = chosen_parts("lrqk")
    assert everything.run_part(part, tmp_path, "tiny", True, 300)[0] == "done"
    assert (tmp_path / "tiny_lrqk.json").is_file()


@pytest.mark.parametrize("name", ["a/b", "h[2]00", "x y"])
def test_a_name_that_no_file_should_have_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "all", "--list", "--name", name]) == 2
    assert "use letters, digits" in capsys.readouterr().err


def test_a_page_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.md").write_text("# Mine")
    with pytest.raises(ValueError, match=r"x\.md"):
        everything.write_page(tmp_path, "x", MEASUREMENTS, False, {})


def test_a_result_that_cannot_be_shown_is_named(tmp_path: Path) -> None:
    (tmp_path / "x_odd.json").write_text("{}")
    page = everything.write_page(tmp_path, "x", MEASUREMENTS, False, {}).read_text()
    assert "## odd\n\nx_odd.json can't be shown: " in page
