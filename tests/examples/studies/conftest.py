"""The studies' modules by plain names, as their scripts import them; a tiny model and text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ...lab.conftest import tiny_model_dir, tiny_text

__all__ = ["tiny_model_dir", "tiny_text"]

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples" / "studies"))


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
