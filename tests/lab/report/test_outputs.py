"""Every command tries the paths of its results before the work, and replaces nothing foreign."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.cli import main
from hf_kvret.lab.report import outputs
from hf_kvret.lab.report.results import Results

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


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of an error."""
    assert main([*map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(("hf-kvret: error: ", "bench_kernels.py: error: "))
    return line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("option", ["--json", "--plot", "--table"])
def test_paths_that_cant_be_written_are_refused(
    command: list[str], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "folder.png"
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    for name, message in (
        ("folder.png", "is a folder: give a file in it"),
        ("file/x.png", "can't be written (Not a directory)"),
        ("x" * 300 + ".png", "can't be written (File name too long)"),
        ("pipe.png", "is no ordinary file"),
    ):
        path = tmp_path / name
        assert f"{option} {path} {message}" in refused(capsys, *command, option, path)
    if option == "--plot":
        assert "must end in .png, .svg, .pdf" in refused(
            capsys, *command, option, tmp_path / "a.gif"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png", "pipe.png"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_one_file_for_two_options_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.png"
    line = refused(capsys, *command, "--json", path, "--plot", path)
    assert f"--json and --plot are both {path}: give each its own file" in line


def test_one_file_by_two_paths_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tmp_path / "real"
    (real / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    kept = real / "kept.png"
    kept.write_text("")
    (tmp_path / "hard.png").hardlink_to(kept)
    for first, second in (
        (real / "x.png", real / "deep" / ".." / "x.png"),
        (real / "x.png", tmp_path / "link" / "x.png"),
        (kept, tmp_path / "hard.png"),
    ):
        line = refused(capsys, *EVAL, "--json", first, "--plot", second)
        assert f"--json and --plot are both {second}: give each its own file" in line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_foreign_json_file_is_not_replaced(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    for content in ('{"name": "somebody"}', "no json", "[" * 100_000, '{"cells": 3}'):
        path.write_text(content)
        assert str(path) in refused(capsys, *command, "--json", path)
        assert path.read_text() == content


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("result", [{}, {"score": [], "step_seconds": {}}], ids=["empty", "wrong"])
def test_a_damaged_cell_is_named_before_the_work(
    command: list[str],
    result: dict[str, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "results.json"
    results = Results(" ".join(command[:2]), {"questions": 1}, path)
    results.add({"cache": "full", "length": 64}, result)
    line = refused(capsys, *command, "--json", path)
    assert f"{path} has a damaged cell, full 64 (" in line
    assert line.endswith(": delete it, or make it again")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_foreign_text_is_not_replaced_by_a_table(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "README.md"
    path.write_text("# Mine\n")
    line = refused(capsys, *command, "--table", path)
    assert "holds something else than what hf-kvret wrote" in line
    assert path.read_text() == "# Mine\n"


def test_a_table_of_ours_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.md"
    outputs.write_table(path, "| a |\n| - |")
    assert path.read_text().startswith("| a |\n")
    # Also one without a mark, as they were at first, and a page of report.
    for text in (
        path.read_text(),
        "| a |\n| - |\n\n",
        f"# Mine\n\n{outputs.page_mark('report')}\n",
        "",
    ):
        path.write_text(text)
        outputs.check_own("--table", path)


def test_a_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    outputs.check_file("--json", tmp_path / "a" / "b" / "c.json", replaced=True)
    outputs.check_folder("--out", tmp_path / "d" / "e")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="no file system to fail on")
def test_a_folder_that_takes_no_files_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    # Also the superuser, whom permissions don't stop, can't write there.
    line = refused(capsys, *EVAL, "--json", "/proc/none/x.json")
    assert "--json /proc/none/x.json can't be written" in line
    assert "--out /proc/none can't be written" in refused(capsys, *CALIBRATE, "--out", "/proc/none")


def test_an_artifact_takes_a_folder_without_files_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    line = refused(capsys, *CALIBRATE, "--out", tmp_path / "file")
    assert "is a file: give a folder" in line
    (tmp_path / "README.md").write_text("# My project\n")
    line = refused(capsys, *CALIBRATE, "--out", tmp_path)
    assert "README.md" in line and "would be replaced" in line
    assert (tmp_path / "README.md").read_text() == "# My project\n"
