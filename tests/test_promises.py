"""Every promise names a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"


def _rows() -> list[tuple[str, str]]:
    """Promises and what is named beside them."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    rows = [tuple(part.strip() for part in line.strip("| ").split("|")) for line in lines]
    return [(row[0], row[1]) for row in rows if row != ("promise", "test")]


@pytest.mark.parametrize(("promise", "test"), _rows())
def test_a_promise_is_held_by_a_test(promise: str, test: str) -> None:
    match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
    assert match, f"{promise!r} names {test!r} instead of one test"
    path, name = match.groups()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_there_are_promises() -> None:
    assert len(_rows()) > 20
