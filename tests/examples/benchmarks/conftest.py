"""The benches' modules by plain names, as their scripts import them, and the bench command."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_kvret.lab.program.scripts import load_measurement, script_parser

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))

_spec = importlib.util.spec_from_file_location(
    "hf_kvret_test_benchmark", ROOT / "tests" / "lab" / "bench" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
refused = _fixtures.refused


@pytest.fixture
def bench() -> Callable[..., int]:
    """``bench("kernels", "--ops", "paris")`` runs a script's measurement; returns its status."""

    def run(name: str, *arguments: str) -> int:
        place = ["--device", "cpu"] if name == "kernels" else []
        options = script_parser(load_measurement(f"bench {name}")).parse_args([*place, *arguments])
        return options.run(options)

    return run
