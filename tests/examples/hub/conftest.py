"""A small model, the hub of the tests of artifacts, and the blocks of docs/hub.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ...artifacts.conftest import hub, llama

__all__ = ["hub", "llama"]

PAGE = Path(__file__).parents[3] / "docs" / "hub.md"


@pytest.fixture(scope="session")
def example() -> Callable[[str], str]:
    """``example(TEXT)``: the Python block of the page with this text."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)

    def find(text: str) -> str:
        [block] = [block for block in blocks if text in block]
        return block

    return find
