"""The tiny model and text of the tests of evaluation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "hf_kvret_test_evaluation", Path(__file__).parents[2] / "evaluation" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
tiny_model_dir, tiny_text = _fixtures.tiny_model_dir, _fixtures.tiny_text
