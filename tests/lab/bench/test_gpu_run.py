"""``bench all``: every stage runs, what is finished is kept, and pages mix no cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_kvret import cli
from hf_kvret.lab.bench import gpu_run
from hf_kvret.lab.bench.gpu_run import (
    NOW,
    PAGE,
    ROWS,
    STAGES,
    Bench,
    Stage,
    add_row,
    cells_of,
    read_rows,
)
from hf_kvret.lab.bench.opponents import choose_bench_cache


def run(folder: Path, *options: str) -> int:
    return cli.main(["bench", "all", "--dry", "--out", str(folder), *options])


def finished(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / ROWS) if "cell" in row]


@pytest.mark.slow
def test_a_dry_run_measures_every_cell_of_every_stage(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    assert all(row["row"]["seconds"] for row in finished(tmp_path))
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert all(f"## {stage.question}" in page for stage in STAGES)
    assert "not measured" not in page.lower()
    assert {path.name for path in tmp_path.iterdir()} == {ROWS, PAGE}


@pytest.mark.parametrize(("dry", "device"), [(False, "cuda"), (True, "cpu")])
def test_all_of_it_takes_some_eight_minutes_and_every_cache_is_known(
    dry: bool, device: str
) -> None:
    assert sum(stage.seconds for stage in STAGES) <= 8 * 60
    cells = [cell for stage in STAGES for cell in cells_of(stage, dry)]
    for name in {cell["cache"] for cell in cells}:
        choose_bench_cache(name, {"store": "device"}, device)


def _cell(number: int) -> dict[str, Any]:
    return {"cache": "dense", "context": number, "batch": 1}


def _row(number: int, card: str, **row: Any) -> dict[str, Any]:
    return {"stage": "fake", "card": card, "cell": _cell(number), "row": {"seconds": 1.0} | row}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[int, Exception]:
    """A stage of three cells, which raise what is put here."""
    errors: dict[int, Exception] = {}

    def measured(bench: Bench, stage: Stage, cell: dict[str, Any]) -> dict[str, Any]:
        if error := errors.get(cell["context"]):
            raise error
        return {"seconds": 1.0}

    stage = Stage("fake", "Does it go on?", 60, list(map(_cell, range(3))))
    monkeypatch.setattr(gpu_run, "STAGES", (stage,))
    monkeypatch.setattr(gpu_run, "cells_of", lambda stage, dry: stage.cells)
    monkeypatch.setattr(Bench, "row", measured)
    return errors


def test_a_run_goes_on_behind_a_cell_that_fails_or_ends_the_process(
    fake: dict[int, Exception], tmp_path: Path
) -> None:
    # The process ends in the first cell, as in one that hangs.
    fake |= {0: KeyboardInterrupt(), 1: RuntimeError("no such kernel")}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert (tmp_path / NOW).exists() and not finished(tmp_path)
    assert run(tmp_path) == 0
    rows = [row["row"] for row in finished(tmp_path)]
    assert [row["cell"]["context"] for row in finished(tmp_path)] == [0, 1, 2]
    assert "took too long" in rows[0]["failed"] and "no such kernel" in rows[1]["failed"]
    assert not (tmp_path / NOW).exists()


def test_a_call_without_time_says_what_is_missing(
    fake: dict[int, Exception], tmp_path: Path
) -> None:
    assert run(tmp_path, "--minutes", "0.01") == 1
    with (tmp_path / ROWS).open("a") as file:
        # A full disk, or a power cut, left a part of a line.
        file.write('{"stage": "fa')
    add_row(tmp_path / ROWS, _row(0, "CPU (dry)"))
    # Cells of another card don't count for this one.
    add_row(tmp_path / ROWS, _row(1, "H100"))
    add_row(tmp_path / ROWS, _row(2, "H100"))
    assert run(tmp_path, "--minutes", "0.01") == 1
    page = (tmp_path / PAGE).read_text()
    assert "Not measured: dense at 1 x 1; dense at 2 x 1." in page


def test_a_page_has_a_table_for_each_card(fake: dict[int, Exception], tmp_path: Path) -> None:
    for card, seconds in (("H100", 1.0), ("H200", 2.0)):
        file = tmp_path / f"gpu.{card}.jsonl"
        versions = {"command": "c", "python": "3.12", "versions": {"torch": "2.11.0"}}
        add_row(file, {"card": card, "environment": versions})
        add_row(file, _row(0, card, seconds=9.0))
        add_row(file, _row(0, card, seconds=seconds))
        add_row(file, _row(1, card, check_failed="a | b"))
    (tmp_path / "gpu.notes.txt").write_text("Words before all tables.\n")
    assert cli.main(["bench", "all", "--pages", str(tmp_path)]) == 0
    first, second = (tmp_path / PAGE).read_text().split("**H200**")
    assert "1,000" in first and "2,000" in second and "9,000" not in first + second
    assert "Words before" in first and r"a \| b" in first and first.count("Not measured") == 1
    with pytest.raises(ValueError, match="no rows"):
        gpu_run.write_page(tmp_path / "other.md", [])
