"""Result files: finished cells stay, other set-ups and foreign files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.report.outputs import check_file
from hf_kvret.lab.report.results import Results, read_results, why_no_results

CELL = {"cache": "full", "length": 64}
PUBLISHED = Path(__file__).parents[3] / "docs" / "results"


def _two_cells(path: Path, setup: dict[str, Any]) -> dict[str, Any]:
    results = Results("eval x", setup, path)
    results.add(CELL, {"score": setup["seed"]})
    results.add(CELL | {"length": 128}, {"score": setup["seed"]})
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_finished_cells_are_found_again(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.json"
    first = Results("eval x", {"seed": 1, "lengths": (1, 2)}, file)
    assert first.find(CELL) is None and len(first) == 0
    first.add(CELL, {"score": 1.5})
    again = Results("eval x", {"lengths": (1, 2), "seed": 1}, file)
    assert again.find({"length": 64, "cache": "full"}) == {"score": 1.5}
    again.add(CELL | {"length": 128}, {"score": None})
    assert [
        cell["length"] for cell, _ in Results("eval x", {"seed": 1, "lengths": [1, 2]}, file)
    ] == [
        64,
        128,
    ]
    assert [path.name for path in file.parent.iterdir()] == ["results.json"]


def test_a_file_beside_the_results_stays(tmp_path: Path) -> None:
    file, other = tmp_path / "results.json", tmp_path / "results.json.new"
    other.write_text("mine")
    check_file("--json", file, replaced=True)
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
        ("{", "is not JSON"),
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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        read_results(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"score": 1.5', '"score": 1.7'), "the cell cache full, length 64 is not what its"),
        (('"length": 64', '"length": 65'), "the cell cache full, length 65 is not what its"),
        (('"seed": 1', '"seed": 3'), "name, set-up and environments are not what its checksum"),
        (('"format": 1', '"format": true'), "has format True, this version reads 1"),
    ],
)
def test_a_changed_file_is_refused_and_what_changed_is_named(
    change: tuple[str, str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    Results("eval x", {"seed": 1}, file).add(CELL, {"score": 1.5})
    assert change[0] in file.read_text()
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(ValueError, match=words):
        Results("eval x", {"seed": 1}, file)


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


@pytest.mark.parametrize("setup", [{"seed": 2}, {"seed": 1, "more": 0}], ids=str)
def test_a_cell_of_another_file_is_refused(setup: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    content, other = _two_cells(file, {"seed": 1}), _two_cells(tmp_path / "other.json", setup)
    content["cells"][1] = other["cells"][1]
    file.write_text(json.dumps(content))
    words = "the cell cache full, length 128 is not what its checksum says, or of another file"
    with pytest.raises(ValueError, match=words):
        read_results(file)


def test_a_cell_that_stands_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    content = _two_cells(file, {"seed": 1})
    assert len(read_results(file)["cells"]) == 2
    content["cells"].insert(1, dict(reversed(content["cells"][0].items())))
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"the cell cache full, length 64 is there twice; .* out"):
        Results("eval x", {"seed": 1}, file)


def test_published_results_are_read_as_they_are() -> None:
    cells = 0
    for path in sorted(PUBLISHED.rglob("*.json")):
        if why_no_results(path) is None:
            before = json.loads(path.read_text())
            results = Results.load(path)
            assert [one for one, _ in results] == [entry["cell"] for entry in before["cells"]]
            cells += len(results)
    assert cells > 500
