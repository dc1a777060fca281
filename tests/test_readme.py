"""The README is short, and its table is that of the demo's results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hf_kvret.cli import main
from hf_kvret.lab.evaluate.bundled import REFERENCE_MODEL
from hf_kvret.lab.evaluate.demo import Demo
from hf_kvret.lab.report.results import Results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 78


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


def test_its_bytes_in_all_are_those_of_fits(capsys: pytest.CaptureFixture[str]) -> None:
    told = re.search(r"([\d.]+) against ([\d.]+) MiB for ([\d,]+) tokens", README)
    coded = re.search(r'`store="higgs-host"`\), the total is ([\d.]+) MiB', README)
    assert told and coded
    where = ["--stores", "host,higgs-host", "--device-memory", "4GB"]
    context = told[3].replace(",", "")
    arguments = ["fits", str(REFERENCE_MODEL), "--context", context, "--caches", "full,paris"]
    assert main([*arguments, *where, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    bytes_of = {row["cache"]: row["device_bytes"] + row["host_bytes"] for row in rows}
    caches = ("paris:store=host", "full", "paris:store=higgs-host")
    assert [f"{bytes_of[name] / 2**20:.1f}" for name in caches] == [told[1], told[2], coded[1]]
