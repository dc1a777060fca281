"""``hf-kvret report``: pages with table, picture and command, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.bench.parser import MEASUREMENTS as BENCH
from hf_kvret.lab.evaluate.tasks import TASKS
from hf_kvret.lab.program.scripts import SCRIPTS, load_measurement
from hf_kvret.lab.report.report import listed_pages, shown_tables, write_report
from hf_kvret.lab.report.results import Results
from hf_kvret.lab.tune.command import Tune

MEASUREMENTS = {f"eval {name}": task for name, task in TASKS.items()} | BENCH | {"tune": Tune}
PUBLISHED = Path(__file__).parents[3] / "docs" / "results"


def test_published_pages_have_the_tables_of_their_results() -> None:
    files = {path.stem for path in PUBLISHED.glob("*.json")}
    pages = listed_pages(PUBLISHED, files)
    assert files == {part.result for page in pages.values() for part in page.parts}
    for name, page in pages.items():
        text = (PUBLISHED / f"{name}.md").read_text(encoding="utf-8")
        for part in page.parts:
            results = Results.load(PUBLISHED / f"{part.result}.json")
            if results.name in SCRIPTS:
                measurement = load_measurement(results.name)
            else:
                measurement = MEASUREMENTS[results.name]
            table = shown_tables(measurement.table(results), part)
            picture = f"![{results.name}](images/{part.result}.png)"
            assert f"\n\n{table}\n\n{picture}" in text, f"{name}: {part.result}"


def _ruler(folder: Path) -> Path:
    path = folder / "mine.json"
    results = Results("eval ruler", {"model": "m", "samples": 2}, path)
    for cache, score, read in (("full", 100.0, 1.0), ("paris", 50.0, 0.02)):
        cell = {"cache": cache, "task": "vt", "length": 4096, "questions": "inside"}
        found = {"score": score, "read_ratio": read, "step_bytes": 4, "full_bytes": 100}
        results.add(cell, found)
    return path


def test_a_page_has_table_picture_command_and_notes(tmp_path: Path, program: Any) -> None:
    _ruler(tmp_path)
    (tmp_path / "mine.notes.txt").write_text("What stands out.\n")
    (tmp_path / "other.json").write_text(json.dumps({"name": "demo", "results": []}))
    (tmp_path / "tsconfig.json").write_text("{ // no JSON")
    Results("eval weather", {}, tmp_path / "later.json").add({"cache": "full"}, {})
    printed = program("report", tmp_path).out
    page = (tmp_path / "mine.md").read_text()
    assert "| vt             | 100.0" in page and "| 50.0" in page and "What stands out." in page
    assert "threads, no GPU" in page or "threads, NVIDIA" in page
    assert "transformers 5." in page and "model m, samples 2." in page
    assert (tmp_path / "images" / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.glob("*.md")) == ["mine.md"]
    for name in ("other", "tsconfig"):
        assert f"skipped {tmp_path / name}.json: no results of hf-kvret\n" in printed
    assert "later.json: this version does not know 'eval weather'\n" in printed
    assert f"wrote {tmp_path / 'mine.md'}\n" in printed
    # Pages of ours are made again.
    program("report", tmp_path)


def test_mistakes_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        write_report(tmp_path / "none", MEASUREMENTS)
    with pytest.raises(FileNotFoundError, match="has no result file"):
        write_report(tmp_path, MEASUREMENTS)
    assert not list(tmp_path.iterdir())
    _ruler(tmp_path)
    (tmp_path / "mine.md").write_text("Notes of my own.")
    with pytest.raises(ValueError, match=r"mine\.md holds something else"):
        write_report(tmp_path, MEASUREMENTS)
    assert (tmp_path / "mine.md").read_text() == "Notes of my own."


def _listed(folder: Path, text: str) -> Path:
    (folder / "pages.toml").write_text(text)
    return folder


SHOWN = """
[speed]
title = "How fast is it?"
parts = [
    { result = "mine", heading = "Mine", columns = ["task", "paris, 4096 inside"], rows = "^vt" },
    { result = "other", heading = "Other" },
]
"""


def test_a_page_may_show_parts_of_several_results(tmp_path: Path) -> None:
    _ruler(tmp_path).rename(tmp_path / "other.json")
    _ruler(tmp_path).with_name("third.json").write_bytes((tmp_path / "mine.json").read_bytes())
    (tmp_path / "speed.notes.txt").write_text("It is fast.\n")
    pages = write_report(_listed(tmp_path, SHOWN), MEASUREMENTS)
    assert [page.name for page in pages] == ["speed.md", "third.md"]
    page = (tmp_path / "speed.md").read_text()
    assert page.startswith(
        "# How fast is it?\n\nIt is fast.\n\n## Mine\n\n| task | paris, 4096 inside |"
    )
    mine, other = page.split("## Other")
    assert "| vt   | 50.0" in mine and "100.0" not in mine and "cold rows" not in mine
    assert "100.0" in other and "cold rows read" in other
    assert "(images/mine.png)" in mine and "[mine.json](mine.json)" in mine
    assert (tmp_path / "third.md").read_text().startswith("# eval ruler: third\n\n| task")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('result = "other"', 'result = "none"', "names none: no such result file"),
        ('"task"', '"weather"', r"mine has no columns \['weather'\]"),
    ],
)
def test_mistakes_in_the_list_of_pages_are_named(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    _ruler(tmp_path).with_name("other.json").write_bytes((tmp_path / "mine.json").read_bytes())
    with pytest.raises((ValueError, TypeError), match=words):
        write_report(_listed(tmp_path, SHOWN.replace(old, new)), MEASUREMENTS)
