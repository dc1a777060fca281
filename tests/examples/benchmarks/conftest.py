"""The benches' modules by plain names, as their scripts import them, and the bench command."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples" / "benchmarks"))

_spec = importlib.util.spec_from_file_location(
    "hf_kvret_test_benchmark", ROOT / "tests" / "benchmark" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
bench, refused, small_buffers = _fixtures.bench, _fixtures.refused, _fixtures.small_buffers
six_layers = _fixtures.six_layers
