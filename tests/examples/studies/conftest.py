"""The studies' modules by plain names, as their scripts import them; a tiny model and text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples" / "studies"))

_spec = importlib.util.spec_from_file_location(
    "hf_kvret_test_evaluation", ROOT / "tests" / "lab" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
tiny_model_dir, tiny_text = _fixtures.tiny_model_dir, _fixtures.tiny_text


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refused(MEASUREMENT, *arguments)``: the line that says why, with exit status 2."""
    from hf_kvret.lab.program.scripts import run_script

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
