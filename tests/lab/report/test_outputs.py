"""Every command tries the paths of its results before the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.report import outputs

# A command of each kind, and the function that begins its work.
EVAL = ["eval", "niah", "--model", "needle"]
BENCH = ["bench", "decode"]
ALONE = ["bench", "kernels"]
CALIBRATE = ["calibrate", "a2ats", "--model", "needle"]
COMMANDS = (["demo"], EVAL, BENCH, ALONE)


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes beyond the look at the paths fails the test."""
    monkeypatch.setattr(
        "hf_kvret.lab.calibrate.command.load_subject", lambda *given: pytest.fail("work has begun")
    )

    def look(*given: Any) -> None:
        outputs.check_outputs(*given)
        pytest.fail("work has begun")

    monkeypatch.setattr("hf_kvret.lab.evaluate.measurement.check_outputs", look)


@pytest.fixture
def refused(program: Any) -> Callable[..., str]:
    """The one line of an error."""

    def line(*words: object) -> str:
        (line,) = program(*words, status=2).err.splitlines()
        assert line.startswith(("hf-kvret: error: ", "bench_kernels.py: error: "))
        return line

    return line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("option", ["--json", "--plot", "--table"])
def test_paths_that_cant_be_written_are_refused(
    command: list[str], option: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "folder.png"
    folder.mkdir()
    line = refused(*command, option, folder)
    assert f"{option} {folder} is a folder: give a file in it" in line
    line = refused(*command, option, tmp_path / "file" / "x.png")
    assert f"{option}: no file can be written to {tmp_path / 'file'} (" in line
    if option == "--plot":
        line = refused(*command, option, tmp_path / "a.gif")
        assert "must end in .png, .svg, .pdf" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


def test_one_file_for_two_options_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for first, second in (("x.png", "x.png"), ("link/x.png", "x.png")):
        line = refused(*EVAL, "--json", tmp_path / first, "--plot", tmp_path / second)
        assert "would write one file twice" in line and "give each its own" in line


@pytest.mark.parametrize(
    ("option", "name", "content"),
    [
        ("--json", "mine.json", '{"name": "somebody"}'),
        ("--json", "mine.json", "no json"),
        ("--json", "mine.json", '{"cells": 3}'),
        ("--table", "README.md", "# Mine\n"),
    ],
)
def test_a_file_of_others_is_not_replaced(
    option: str, name: str, content: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = tmp_path / name
    path.write_text(content)
    line = refused(*EVAL, option, path)
    assert str(path) in line and ("no result file" in line or "holds something else" in line)
    assert path.read_text() == content


def test_a_trial_leaves_no_file_behind(tmp_path: Path) -> None:
    outputs.check_file("--json", tmp_path / "a" / "b.json")
    outputs.check_folder("--out", tmp_path / "c")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="no file system to fail on")
def test_a_folder_that_takes_no_files_is_refused(refused: Callable[..., str]) -> None:
    # Also the superuser, whom permissions don't stop, can't write there.
    line = refused(*EVAL, "--json", "/proc/none/x.json")
    assert "--json: no file can be written to /proc/none" in line
    line = refused(*CALIBRATE, "--out", "/proc/none")
    assert "--out: no file can be written to /proc/none" in line


def test_an_artifact_takes_a_folder_without_files_of_others(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("")
    line = refused(*CALIBRATE, "--out", tmp_path / "file")
    assert "no file can be written" in line
    (tmp_path / "README.md").write_text("# My project\n")
    line = refused(*CALIBRATE, "--out", tmp_path)
    assert "README.md" in line and "would be replaced" in line
    assert (tmp_path / "README.md").read_text() == "# My project\n"
