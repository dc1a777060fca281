"""``bench all``: every stage runs, what is finished is kept, and pages mix no cards."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hf_kvret import cli
from hf_kvret.lab.bench import gpu_page, gpu_run
from hf_kvret.lab.bench.gpu_page import RowFile, write_page
from hf_kvret.lab.bench.gpu_run import NOW, PAGE, ROWS, waiting
from hf_kvret.lab.bench.gpu_stages import STAGES, Stage, cells_of, kernel_times
from hf_kvret.lab.bench.opponents import choose_bench_caches

DRY = {"stages": [stage.name for stage in STAGES], "dry": True, "since": 0, "seconds": 250.0}


def test_a_dry_run_measures_every_cell_of_every_stage(tmp_path: Path) -> None:
    assert gpu_run.measure(tmp_path, DRY) == 0
    rows = RowFile(tmp_path / ROWS).rows()
    assert not list(waiting(rows, DRY, "CPU (dry)"))
    for row in rows[1:]:
        checks = row["row"].get("status") in ("measured", "passed", "skipped")
        assert checks or {"seconds", "kernels"} & row["row"].keys(), row
    page = write_page(tmp_path / PAGE, [tmp_path / ROWS]).read_text(encoding="utf-8")
    assert all(f"## {stage.question}" in page for stage in STAGES)
    assert "not measured" not in page.lower()
    assert {path.name for path in tmp_path.iterdir()} == {ROWS, PAGE}


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_caches_of_a_run_are_known_and_cells_are_told_apart(stage: Stage) -> None:
    for dry, device in ((False, "cuda"), (True, "cpu")):
        cells = cells_of(stage, dry)
        assert len({json.dumps(cell) for cell in cells}) == len(cells)
        caches = dict.fromkeys(cell["cache"] for cell in cells if "cache" in cell)
        if caches:
            choose_bench_caches(list(caches), {"store": "device"}, device)


def test_all_of_it_takes_some_eight_minutes() -> None:
    assert sum(stage.seconds for stage in STAGES) <= 510
    assert [stage.name for stage in STAGES[:3]] == ["gate", "profile", "stores"]
    with pytest.raises(ValueError, match="--only store: choose of gate, profile, stores"):
        gpu_run.chosen_stages("store")


def _cell(number: int) -> dict[str, Any]:
    return {"cache": "dense", "context": number, "batch": 1}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stage of five cells; workers do what the list says, one after the other."""

    def cells(dry: bool) -> list[dict[str, Any]]:
        return [_cell(number) for number in range(5)]

    stage = Stage("fake", "Does it go on?", 60, cells, lambda bench, cell: {})
    for module in (gpu_run, gpu_page):
        monkeypatch.setattr(module, "STAGES", (stage,))
        monkeypatch.setattr(module, "cells_of", lambda stage, dry: stage.cells(dry))
    script: list[Any] = []

    def work(out: Path, plan: dict[str, Any]) -> int:
        """Finish some cells and end in the next one, or behind it."""
        count, status = script.pop(0)
        file = RowFile(out / ROWS)
        pending = [cell for _, cell in waiting(file.rows(), plan, "CPU (dry)")]
        for cell in pending[:count]:
            file.add(_row(cell["context"]))
        if status not in (0, 3):
            begun = {"stage": "fake", "card": "CPU (dry)", "cell": pending[count]}
            (out / NOW).write_text(json.dumps(begun))
        return int(status)

    monkeypatch.setattr(gpu_run, "_work", work)
    return script


def _row(number: int, card: str = "CPU (dry)", **row: Any) -> dict[str, Any]:
    entries = {"seconds": 1.0, "steps": {"replay": 3}} | row
    return {"stage": "fake", "card": card, "cell": _cell(number), "row": entries}


def run(folder: Path, *options: str) -> int:
    return cli.main(["bench", "all", "--dry", "--out", str(folder), *options])


def test_a_run_goes_on_behind_what_hangs_or_breaks_the_device(
    fake: list[Any], tmp_path: Path
) -> None:
    fake += [(1, 1), (1, 3), (0, -11), (0, 0)]
    assert run(tmp_path) == 1
    rows = {row["cell"]["context"]: row["row"] for row in RowFile(tmp_path / ROWS).rows()}
    assert sorted(rows) == [0, 1, 2, 3] and not fake
    assert "took too long" in rows[1]["failed"] and "-11" in rows[3]["failed"]
    assert "Not measured: dense at 4 x 1." in (tmp_path / PAGE).read_text()
    # The same call goes on, and a kill in the middle of a line costs that line.
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"stage": "fake", "ca')
    fake += [(1, 0)]
    assert run(tmp_path) == 0
    assert len(RowFile(tmp_path / ROWS).rows()) == 5
    # Named stages are measured again, and the newest row of a cell counts.
    fake += [(2, -9), (5, 0)]
    assert run(tmp_path, "--only", "fake") == 0
    assert len(RowFile(tmp_path / ROWS).rows()) == 10
    assert not (tmp_path / NOW).exists()


def test_a_worker_that_breaks_before_its_first_cell_is_not_started_again(
    fake: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "_work", lambda out, plan: fake.append(0) or 1)
    RowFile(tmp_path / ROWS).add(_row(0))
    assert run(tmp_path) == 1 and len(fake) == 1


def test_a_page_has_a_table_for_each_card(fake: list[Any], tmp_path: Path) -> None:
    for name, seconds in (("H100", 1.0), ("H200", 2.0)):
        file = RowFile(tmp_path / f"gpu.{name}.jsonl")
        versions = {"python": "3.12", "versions": {"torch": "2.11.0"}}
        file.add({"card": name, "environment": versions})
        file.add(_row(0, name, seconds=9.0))
        file.add(_row(0, name, seconds=seconds))
        file.add(_row(1, name, check_failed="a | b"))
    (tmp_path / "gpu.notes.txt").write_text("Words before all tables.\n")
    assert cli.main(["bench", "all", "--pages", str(tmp_path)]) == 0
    first, second = (tmp_path / PAGE).read_text().split("**H200**")
    assert "1,000" in first and "2,000" in second and "9,000" not in first + second
    assert "Words before" in first and r"a \| b" in first and first.count("Not measured") == 1
    (tmp_path / PAGE).write_text("my own")
    with pytest.raises(ValueError, match="holds something else"):
        write_page(tmp_path / PAGE, [tmp_path / "gpu.H100.jsonl"])
    with pytest.raises(ValueError, match="no rows"):
        write_page(tmp_path / "other.md", [])


def test_times_of_kernels_say_how_long_nothing_ran() -> None:
    events = [("a", 0.0, 2.0), ("b", 1.0, 4.0), ("a", 10.0, 14.0), ("c", 11.0, 12.0)]
    row = kernel_times(events, 2)
    assert (row["launches"], row["busy_us"], row["span_us"]) == (2.0, 4.0, 7.0)
    assert row["kernels"][0] == {"name": "a", "launches": 1.0, "us": 3.0, "step_us": 3.0}
    assert kernel_times([], 2)["span_us"] == 0.0


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_finished_cell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hf_kvret.cli", "bench", "all", "--dry", "--out", "gpu"]
    file, finished = RowFile(tmp_path / "gpu" / ROWS), 0
    for seed in range(5):
        process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
        time.sleep(random.Random(seed).uniform(8, 20))
        if seed % 2:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        # A worker whose parent is gone ends by itself.
        time.sleep(2)
        rows = len(file.rows())
        assert rows >= finished
        finished = rows
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    cells = [(row["stage"], str(row["cell"])) for row in file.rows() if "cell" in row]
    assert len(cells) == len(set(cells)) == sum(len(cells_of(stage, True)) for stage in STAGES)
