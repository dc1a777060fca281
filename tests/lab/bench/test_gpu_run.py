"""``bench all``: every stage runs, what is finished is kept, and tables mix no cards."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hf_kvret import cli
from hf_kvret.lab.bench import gpu_run
from hf_kvret.lab.bench.gpu_run import STAGES, BenchAll, Stage
from hf_kvret.lab.bench.opponents import choose_bench_cache
from hf_kvret.lab.report.results import Results


def run(folder: Path, *options: str) -> int:
    return cli.main(["bench", "all", "--dry", "--json", str(folder / "gpu.json"), *options])


def finished(folder: Path) -> dict[int, dict[str, Any]]:
    return {cell["context"]: row for cell, row in Results.load(folder / "gpu.json")}


@pytest.mark.slow
def test_a_dry_run_measures_every_cell_of_every_stage(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--plot", str(tmp_path / "gpu.png")) == 0
    assert all(row["seconds"] for _, row in Results.load(tmp_path / "gpu.json"))
    table = capfd.readouterr().out
    assert all(f"## {stage.question}" in table for stage in STAGES)
    assert "not measured" not in table.lower()


@pytest.mark.parametrize(("card", "device"), [("H200", "cuda"), ("CPU (dry)", "cpu")])
def test_it_takes_eight_minutes_and_every_cache_is_known(card: str, device: str) -> None:
    assert sum(stage.seconds for stage in STAGES) <= 8 * 60
    for name in {cell["cache"] for stage in STAGES for cell in stage.on(card)}:
        choose_bench_cache(name, {"store": "device"}, device)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[int, BaseException]:
    """A stage of three cells, which raise what is put here."""
    errors: dict[int, BaseException] = {}

    def measured(bench: BenchAll, cell: dict[str, Any]) -> dict[str, Any]:
        if error := errors.get(cell["context"]):
            raise error
        return {"seconds": 1.0}

    cells = [{"cache": "dense", "context": number, "batch": 1} for number in range(3)]
    monkeypatch.setattr(gpu_run, "STAGES", (Stage("fake", "Does it go on?", 60, cells),))
    monkeypatch.setattr(gpu_run, "_shrunk", lambda cell: cell)
    monkeypatch.setattr(BenchAll, "row", measured)
    return errors


def test_a_run_goes_on_behind_a_cell_that_fails_or_ends_the_process(
    fake: dict[int, BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Mock(fault=Mock(return_value=None))
    monkeypatch.setattr(gpu_run, "faulthandler", watch)
    monkeypatch.setattr(gpu_run, "device_fault", watch.fault)
    # The process ends in the first cell, as in one that hangs.
    fake |= {0: KeyboardInterrupt(), 1: RuntimeError("no such kernel")}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    rows = finished(tmp_path)
    assert "took too long" in rows[0]["failed"] and "no such kernel" in rows[1]["failed"]
    # The second call came back to it behind all others.
    assert rows[2] == {"seconds": 1.0}
    del fake[0]
    assert run(tmp_path) == 1
    assert finished(tmp_path)[0] == {"seconds": 1.0}
    # The watchdog is on while we wait for the device behind an error.
    names = [call[0].split("_")[0] for call in watch.mock_calls]
    assert names[-4:] == ["dump", "fault", "cancel", "fault"]
    fake.clear()
    assert run(tmp_path) == 0


def test_a_table_says_what_is_missing_and_has_no_rows_of_another_card(
    fake: dict[int, BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results("bench all", BenchAll(dry=True).setup(), tmp_path / "gpu.json")
    for card, number, seconds in (("CPU (dry)", 0, 2.0), ("H100", 1, 3.0)):
        cell = {"stage": "fake", "card": card, "cache": "dense", "context": number, "batch": 1}
        results.add(cell, {"seconds": seconds})
    assert run(tmp_path, "--minutes", "0.01") == 1
    first, second = capsys.readouterr().out.split("**H100**")
    assert "2,000" in first and "3,000" in second and "3,000" not in first
    assert "Not measured: dense at 1 x 1; dense at 2 x 1." in first
