"""The one loop: cells go in, rows come out, and an interrupted run goes on."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

from hf_kvret.lab.evaluate.failures import CheckFailed, attempt
from hf_kvret.lab.evaluate.measurement import Measurement, Outputs, Row, measure, run_measurement
from hf_kvret.lab.program.options import option
from hf_kvret.lab.report.results import Cell, Results
from hf_kvret.lab.report.tables import table_of

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True, kw_only=True)
class Squares(Measurement):
    """The square of each number; ``events`` tells what happened, ``raises`` what goes wrong."""

    command: ClassVar[str] = "eval"
    name: ClassVar[str] = "squares"
    summary: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    events: ClassVar[list[str]] = []
    raises: ClassVar[dict[int, Exception]] = {}

    most: int = option(4)
    factor: int = option(1)

    def check(self) -> None:
        if self.most > 100:
            raise ValueError(f"--most {self.most}: at most 100")

    def setup(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def cells(self) -> list[Cell]:
        return [{"cache": f"of {number}", "number": number} for number in range(self.most)]

    def rows(self, group: Sequence[Cell]) -> list[Row]:
        self.events.append("+".join(str(cell["number"]) for cell in group))
        for cell in group:
            if cell["number"] in self.raises:
                raise self.raises[cell["number"]]
        return [{"square": self.factor * cell["number"] ** 2} for cell in group]

    @classmethod
    def table(cls, results: Results) -> str:
        columns = {
            "number": lambda cell, row: str(cell["number"]),
            "square": lambda cell, row: str(row.get("square", *row.values())),
        }
        return table_of(results, columns)

    @classmethod
    def plot(cls, path: Path, results: Results) -> None:
        path.write_text("a picture")


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Squares, "events", [])
    monkeypatch.setattr(Squares, "raises", {})


def numbers(path: Path) -> dict[int, Row]:
    cells = json.loads(path.read_text())["cells"]
    return {entry["cell"]["number"]: entry["result"] for entry in cells}


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, capsys: Capture) -> None:
    outputs = Outputs(json=tmp_path / "squares.json")
    Squares.raises[2] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_measurement(Squares(), outputs)
    assert numbers(outputs.json) == {0: {"square": 0}, 1: {"square": 1}}
    assert "| 1      | 1      |" in capsys.readouterr().out
    Squares.raises.clear()
    Squares.events.clear()
    assert run_measurement(Squares(), outputs) == 0
    assert Squares.events == ["2", "3"]
    assert numbers(outputs.json) == {n: {"square": n**2} for n in range(4)}
    assert "2 cells were finished already" in capsys.readouterr().out


def test_a_mistake_is_said_before_any_cell(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--most 101: at most 100"):
        run_measurement(Squares(most=101), Outputs(json=tmp_path / "a.json"))
    assert Squares.events == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), "out of memory ("),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory ("),
        (MemoryError(), "out of memory ("),
        (CheckFailed("1 is no square"), "1 is no square"),
    ],
)
def test_a_cell_that_fails_is_named_and_tried_again(
    error: Exception, why: str, tmp_path: Path, capsys: Capture
) -> None:
    Squares.raises[1] = error
    outputs = Outputs(json=tmp_path / "a.json")
    assert run_measurement(Squares(), outputs) == 1
    assert f"of 1 1: {why}" in capsys.readouterr().out
    assert set(numbers(outputs.json)) == {0, 2, 3}
    Squares.raises.clear()
    assert run_measurement(Squares(), outputs) == 0
    assert Squares.events[-1] == "1" and numbers(outputs.json)[1] == {"square": 1}


def test_a_device_that_failed_takes_no_row_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", Mock(side_effect=RuntimeError("CUDA error")))
    assert attempt(lambda: "a row") == ("a row", {})


def test_a_row_that_says_why_a_check_failed_is_measured_again(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = Outputs(json=tmp_path / "a.json")
    with monkeypatch.context() as patch:
        wrong = [{"check_failed": "1 is no square"}]
        patch.setattr(Squares, "rows", lambda self, group: wrong)
        assert run_measurement(Squares(most=1), outputs) == 1
    assert capsys.readouterr().err.endswith(": error: 1 is no square\n")
    assert run_measurement(Squares(most=1), outputs) == 0
    assert numbers(outputs.json) == {0: {"square": 0}}


def test_a_bug_is_no_lack_of_memory(tmp_path: Path, capsys: Capture) -> None:
    Squares.raises[1] = RuntimeError("index out of bounds")
    with pytest.raises(RuntimeError, match="out of bounds"):
        run_measurement(Squares(), Outputs(json=tmp_path / "a.json"))
    assert set(numbers(tmp_path / "a.json")) == {0}
    assert "| 0      | 0      |" in capsys.readouterr().out


def test_cells_of_a_group_are_measured_together() -> None:
    class Pairs(Squares):
        def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
            waiting = self.waiting(results)
            yield waiting[:2]
            yield waiting[2:]

    results = Results("eval squares", {})
    Squares.raises[2] = CheckFailed("2 is no square")
    failed = measure(Pairs(), results)
    assert Squares.events == ["0+1", "2+3"]
    assert [row for _, row in results] == [{"square": 0}, {"square": 1}]
    assert [cell["number"] for cell, _ in failed] == [2, 3]
