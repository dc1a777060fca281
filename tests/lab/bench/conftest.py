"""The bench command as its own small program, and the models it measures in tests."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.bench import timing
from hf_kvret.lab.bench.filling import Turn
from hf_kvret.lab.bench.model_measurement import ModelMeasurement
from hf_kvret.lab.bench.parser import add_bench_parser
from hf_kvret.lab.bench.shapes import load_shape
from hf_kvret.lab.report.results import Results


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth over 4 MiB: quick, and nothing here looks at how true it is."""
    monkeypatch.setattr(timing, "_CPU_BYTES", 1 << 22)


@pytest.fixture
def bench() -> Callable[..., int]:
    """``bench("decode", "--context", "1K")`` runs the command and returns its exit status."""

    def run(*arguments: str) -> int:
        parser = argparse.ArgumentParser()
        add_bench_parser(parser.add_subparsers(required=True))
        more = [] if "--device" in arguments else ["--device", "cpu"]
        options = parser.parse_args(["bench", *arguments, *more])
        return options.run(options)

    return run


@pytest.fixture
def measure(bench: Callable[..., int], tmp_path: Path) -> Callable[..., Results]:
    """As ``bench`` for arguments that succeed; returns the results."""
    numbers = itertools.count()

    def run(*arguments: str) -> Results:
        file = tmp_path / f"results-{next(numbers)}.json"
        assert bench(*arguments, "--json", str(file)) == 0
        return Results.load(file)

    return run


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int]]]:
    """``watch(Decode)`` returns a list that grows by cache and batch of every turn.

    ``before`` is called with each turn, and may raise.
    """

    def start(
        cls: type[ModelMeasurement], before: Callable[[Turn], Any] = lambda turn: None
    ) -> list[tuple[str, int]]:
        turns: list[tuple[str, int]] = []
        once = cls.once

        def watched(self: ModelMeasurement, turn: Turn) -> Any:
            turns.append((turn.choice.name, turn.batch))
            before(turn)
            return once(self, turn)

        monkeypatch.setattr(cls, "once", watched)
        return turns

    return start


@pytest.fixture
def six_layers(tmp_path: Path) -> Path:
    """A folder with the config.json of a tiny model of six layers."""
    folder = tmp_path / "six-layers"
    config = load_shape("tiny").config
    config.num_hidden_layers = 6
    config.save_pretrained(folder)
    return folder
