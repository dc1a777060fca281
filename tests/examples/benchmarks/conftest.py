"""The benches' modules by plain names, as their scripts import them, and the bench command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_kvret.lab.program.scripts import load_measurement, script_parser

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "benchmarks"))


@pytest.fixture
def bench() -> Callable[..., int]:
    """``bench("kernels", "--ops", "paris")`` runs a script's measurement; returns its status."""

    def run(name: str, *arguments: str) -> int:
        place = ["--device", "cpu"] if name == "kernels" else []
        options = script_parser(load_measurement(f"bench {name}")).parse_args([*place, *arguments])
        return options.run(options)

    return run


@pytest.fixture
def refused(bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """As ``bench`` for arguments that are refused; returns what is said of them."""

    def run(*arguments: str) -> str:
        with pytest.raises((SystemExit, ValueError, ModuleNotFoundError)) as caught:
            bench(*arguments)
        return capsys.readouterr().err if caught.type is SystemExit else str(caught.value)

    return run
