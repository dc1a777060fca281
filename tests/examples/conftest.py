"""The scripts of ``examples`` by plain names, as they import each other; their smallest runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.measurement import run_script
from hf_kvret.lab.report.results import Results

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture
def smallest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[dict[tuple[Any, ...], dict[str, Any]], str]]:
    """``smallest(MEASUREMENT)``: its smallest run's rows by the values of a cell, and its table."""

    def run(study: Any, *more: str) -> tuple[dict[tuple[Any, ...], dict[str, Any]], str]:
        monkeypatch.chdir(ROOT)
        file, picture = tmp_path / "x.json", tmp_path / "x.png"
        files = ["--json", str(file), "--plot", str(picture)]
        assert run_script(study, ["--smallest", *more, *files]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        return {
            tuple(cell.values()): row for cell, row in Results.load(file)
        }, capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refused(MEASUREMENT, *arguments)``: the line that says why, with exit status 2."""

    def refuse(study: Any, *arguments: str) -> str:
        try:
            status = run_script(study, list(arguments))
        except SystemExit as error:
            status = error.code
        assert status == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert ".py: error: " in line
        return line

    return refuse
