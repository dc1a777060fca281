"""The C++ fuzzers of tests/fuzz follow the structs of the library's header."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_the_fuzzers_fit_the_header() -> None:
    sources = sorted((ROOT / "tests" / "fuzz").glob("*.cpp"))
    assert sources
    command = [str(COMPILER), "-std=c++17", "-fsyntax-only", "-I", str(ROOT / "kernels" / "csrc")]
    result = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
