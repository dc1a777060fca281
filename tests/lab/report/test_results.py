"""Result files: finished cells stay; other set-ups, files and a second writer are refused."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hf_kvret.lab.report.outputs import check_file
from hf_kvret.lab.report.results import Results, is_results, read_results, sole_writer

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
    third = Results("eval x", {"seed": 1, "lengths": [1, 2]}, file)
    assert [cell["length"] for cell, _ in third] == [64, 128]
    assert [path.name for path in file.parent.iterdir()] == ["results.json"]


def test_a_file_beside_the_results_stays(tmp_path: Path) -> None:
    file, other = tmp_path / "results.json", tmp_path / "results.json.new"
    other.write_text("mine")
    check_file("--json", file)
    Results("eval x", {}, file).add(CELL, {"score": 1})
    assert other.read_text() == "mine" and len(read_results(file)["cells"]) == 1
    # As readable to others as any file that is written here.
    assert file.stat().st_mode == other.stat().st_mode


def test_the_file_names_command_machine_and_versions(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    Results("eval x", {}, file).add(CELL, {})
    Results("eval x", {}, file).add(CELL, {"again": True})
    content = read_results(file)
    assert len(content["environments"]) == 1
    assert {"command", "processor", "versions"} <= set(content["environments"][0])
    (entry,) = content["cells"]
    assert (entry["cell"], entry["result"]) == (CELL, {"again": True})


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = Results("eval x", {})
    results.add(CELL, {"score": 1})
    assert results.find(CELL) == {"score": 1} and not list(tmp_path.iterdir())


def test_another_setup_or_task_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    Results("eval x", {"seed": 1}, file).add(CELL, {"score": 1})
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"seed was 1, now 2.*give another --json"):
        Results("eval x", {"seed": 2}, file)
    with pytest.raises(ValueError, match="holds results of 'eval x', not of 'eval y'"):
        Results("eval y", {"seed": 1}, file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no result file"),
        ("[1]", "no result file"),
        (json.dumps({"name": "demo", "results": []}), "no result file"),
        (
            json.dumps({"name": "x", "setup": {}, "environments": [], "cells": [], "format": 2}),
            "has format 2, this version reads 1: make it again",
        ),
    ],
)
def test_foreign_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        Results("x", {}, file)
    assert file.read_text() == content
    with pytest.raises(FileNotFoundError, match="no file"):
        read_results(tmp_path / "none.json")


def test_a_cell_that_was_taken_out_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    results = Results("eval x", {}, file)
    results.add(CELL, {"score": float("nan"), 3: (1, 2)})
    results.add(CELL | {"length": 128}, {"score": 2})
    content = json.loads(file.read_text())
    del content["cells"][1]
    file.write_text(json.dumps(content))
    again = Results("eval x", {}, file)
    assert len(again) == 1 and again.find(CELL | {"length": 128}) is None
    assert again.find(CELL)["3"] == [1, 2]


def test_published_results_are_read_as_they_are() -> None:
    cells = 0
    for path in sorted(PUBLISHED.rglob("*.json")):
        if is_results(path):
            before = json.loads(path.read_text())
            results = Results.load(path)
            assert [one for one, _ in results] == [entry["cell"] for entry in before["cells"]]
            cells += len(results)
    assert cells > 500


def hold(path: Path, connection: Connection) -> None:
    """Write results until the connection says to stop."""
    with sole_writer(path):
        connection.send("writing")
        connection.recv()


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    """In this process or another one, which leaves its lock behind when it is killed."""
    pytest.importorskip("fcntl", reason="no such locks here")
    path = tmp_path / "cells.json"
    message = r"another process writes its results to .*cells\.json.*give another file or folder"
    with sole_writer(None), sole_writer(None):
        pass
    with pytest.raises(KeyError), sole_writer(path):
        for _ in range(2):
            with pytest.raises(ValueError, match=message), sole_writer(path):
                pass
        with sole_writer(path.with_name("other.json")):
            raise KeyError
    assert list(tmp_path.iterdir()) == []
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=hold, args=(path, theirs))
    process.start()
    assert mine.poll(120) and mine.recv() == "writing"
    with pytest.raises(ValueError, match=message), sole_writer(path):
        pass
    process.kill()
    process.join(60)
    assert list(tmp_path.iterdir()), "its lock is still there"
    with sole_writer(path):
        pass
    assert list(tmp_path.iterdir()) == []
