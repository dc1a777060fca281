"""Result files keep finished cells, and places that can't be written are named before the work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.report.outputs import check_file, check_folder, check_picture
from hf_kvret.lab.report.results import Results, is_results, read_results

CELL = {"cache": "full", "length": 64}
PUBLISHED = Path(__file__).parents[3] / "docs" / "results"


def test_finished_cells_are_found_again(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.json"
    first = Results("eval x", {"seed": 1, "lengths": (1, 2)}, file)
    assert first.find(CELL) is None and len(first) == 0
    first.add(CELL, {"score": 1.5})
    again = Results("eval x", {"lengths": (1, 2), "seed": 1}, file)
    assert again.find({"length": 64, "cache": "full"}) == {"score": 1.5}
    again.add(CELL | {"length": 128}, {"score": None})
    content = json.loads(file.read_text())
    assert [entry["cell"]["length"] for entry in content["cells"]] == [64, 128]
    assert len(content["environments"]) == 1
    assert {"command", "processor", "versions"} <= content["environments"][0].keys()
    # A cell that somebody took out is measured again.
    del content["cells"][1]
    file.write_text(json.dumps(content))
    assert len(Results("eval x", {"seed": 1, "lengths": [1, 2]}, file)) == 1
    assert [path.name for path in file.parent.iterdir()] == ["results.json"]


def test_another_setup_task_or_file_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    Results("eval x", {"seed": 1}, file).add(CELL, {"score": 1})
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"seed was 1, now 2.*give another --json"):
        Results("eval x", {"seed": 2}, file)
    with pytest.raises(ValueError, match="holds results of 'eval x', not of 'eval y'"):
        Results("eval y", {"seed": 1}, file)
    assert file.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="no file"):
        read_results(tmp_path / "none.json")
    for content in ("{", "[1]", '{"name": "demo"}', '{"format": 2, "cells": []}'):
        file.write_text(content)
        with pytest.raises(ValueError, match="no result file that this version"):
            Results("eval x", {}, file)
        assert file.read_text() == content


def test_of_two_processes_that_write_one_file_none_drops_what_the_other_finished(
    tmp_path: Path,
) -> None:
    file = tmp_path / "results.json"
    one, other = (Results("eval x", {}, file) for _ in range(2))
    one.add(CELL, {"score": 1})
    before = file.read_bytes()
    with pytest.raises(ValueError, match="another process writes its results"):
        other.add({"cache": "other"}, {"score": 2})
    assert file.read_bytes() == before
    one.add({"cache": "third"}, {"score": 3})
    assert len(Results.load(file)) == 2


def test_published_results_are_read_as_they_are() -> None:
    cells = 0
    for path in sorted(PUBLISHED.rglob("*.json")):
        if is_results(path):
            before = json.loads(path.read_text())
            results = Results.load(path)
            assert [one for one, _ in results] == [entry["cell"] for entry in before["cells"]]
            cells += len(results)
    assert cells > 500


def test_places_that_cant_be_written_are_refused_and_trials_leave_no_file(tmp_path: Path) -> None:
    check_file("--json", tmp_path / "a" / "b.json")
    check_folder("--out", tmp_path / "c")
    check_picture(tmp_path / "x.PNG")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--json .* is a folder: give a file in it"):
        check_file("--json", tmp_path)
    with pytest.raises(ValueError, match="--out: no file can be written to"):
        check_folder("--out", tmp_path / "file")
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg, \.pdf"):
        check_picture(tmp_path / "a.gif")


@pytest.mark.parametrize(
    "command",
    [["demo"], ["calibrate", "a2ats", "--model", "needle"]],
    ids=lambda words: words[0],
)
def test_every_command_tries_its_outputs_before_the_work(
    command: list[str], tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*given: object) -> None:
        pytest.fail("work has begun")

    monkeypatch.setattr("hf_kvret.lab.calibrate.command.load_subject", begun)
    monkeypatch.setattr("hf_kvret.lab.evaluate.measurement.Results", begun)
    (tmp_path / "file").write_text("")
    option = "--out" if command[0] == "calibrate" else "--json"
    (line,) = program(*command, option, tmp_path / "file" / "x", status=2).err.splitlines()
    assert f"{option}: no file can be written to" in line
