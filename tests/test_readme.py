"""The README is short, and its table is that of the demo's results."""

from __future__ import annotations

import re
from pathlib import Path

from hf_kvret.evaluation.demo import Demo
from hf_kvret.evaluation.results import Results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 70


def cells(table: str) -> list[list[str]]:
    """The rows of a markdown table, without its rule."""
    rows = [line for line in table.splitlines() if line.startswith("|") and set(line) - set("|- ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert README.count("![") == 1


def test_its_table_is_of_the_results_of_what_the_demo_asks() -> None:
    shown = re.search(r"<!-- demo table -->\n(.*?)<!-- end -->", README, flags=re.DOTALL)
    assert shown is not None
    results = Results.load(ROOT / "docs" / "results" / "demo" / "demo.json")
    header, *measured = cells(Demo.table(results).partition("recall / mass")[0])
    assert cells(shown[1]) == [header, *(row for row in measured if row[0] in Demo().choices)]
