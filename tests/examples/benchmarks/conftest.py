"""The benches' modules by plain names, as their scripts import them, and the bench command."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_kvret.lab.evaluate.measurement import add_measurement
from hf_kvret.lab.program.scripts import SCRIPTS, load_measurement

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "examples" / "benchmarks"), str(Path(__file__).parent)]

_spec = importlib.util.spec_from_file_location(
    "hf_kvret_test_benchmark", ROOT / "tests" / "lab" / "bench" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
refused, small_buffers, six_layers = (
    _fixtures.refused,
    _fixtures.small_buffers,
    _fixtures.six_layers,
)


@pytest.fixture
def bench() -> Callable[..., int]:
    """``bench("kernels", "--ops", "paris")`` runs a script's measurement; returns its status."""

    def run(*arguments: str) -> int:
        parser = argparse.ArgumentParser()
        commands = parser.add_subparsers(required=True)
        for title in SCRIPTS:
            if title.startswith("bench "):
                add_measurement(commands, load_measurement(title))
        without = ("host-attention", "save", "machine-code")
        given = "--device" in arguments or arguments[0] in without
        options = parser.parse_args([*arguments, *([] if given else ["--device", "cpu"])])
        return options.run(options)

    return run
