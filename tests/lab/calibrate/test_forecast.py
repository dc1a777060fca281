"""A calibration says how long it will take, from its first measured pieces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_kvret.cli import main
from hf_kvret.lab.calibrate import forecast
from hf_kvret.lab.calibrate.forecast import Forecast, span


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number: the time."""
    now = [0.0]
    monkeypatch.setattr(forecast.time, "perf_counter", lambda: now[0])
    return now


def test_times_are_said_as_people_say_them() -> None:
    said = ["10 seconds", "half a minute", "a minute", "a minute", "12 minutes", "2.0 hours"]
    assert [span(seconds) for seconds in (0.1, 25, 50, 70, 719, 7200)] == said


def test_reading_is_foreseen_from_the_first_sequence(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    told = Forecast(8, 2, 60_000, show=True)
    told.begin()
    clock[0] += 10
    told.read(1000)
    told.read(1000)
    line = "reading takes about 20 minutes (2 passes over 60,000 tokens)"
    assert capsys.readouterr().err.splitlines() == [line]


def test_learning_is_foreseen_from_the_first_second_of_work(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    told = Forecast(8, 1, 100, show=True)
    told.begin()
    clock[0] += 0.5
    told.work(1, 300)
    assert not capsys.readouterr().err
    clock[0] += 1.5
    told.work(1, 300)
    told.finish()
    assert capsys.readouterr().err.splitlines() == ["learning takes about 40 minutes (8 layers)"]


def test_a_quick_layer_foretells_the_others(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    told = Forecast(100, 1, 100, show=True)
    told.begin()
    clock[0] += 0.9
    told.work(5, 5)
    told.finish()
    assert "about 2 minutes (100 layers)" in capsys.readouterr().err


def test_nothing_is_said_where_no_progress_is_shown(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    told = Forecast(2, 1, 100, show=False)
    told.begin()
    clock[0] += 5
    told.read(10)
    told.work(1, 2)
    told.finish()
    assert not capsys.readouterr().err


def test_the_command_says_it_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--tokens", "2K", "--length", "1K", "--codewords", "8", "--rounds", "2"]
    out = ["--out", str(tmp_path / "out")]
    assert main(["calibrate", "a2ats", "--model", "needle", *size, *out]) == 0
    shown = capsys.readouterr().err
    span = "(10 seconds|half a minute|a minute)"
    reading = re.search(rf"reading takes about {span} \(one pass over 2,048 tokens\)", shown)
    learning = re.search(rf"learning takes about {span} \(3 layers\)", shown)
    assert reading and learning and reading.start() < learning.start()
