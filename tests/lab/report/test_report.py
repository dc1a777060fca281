"""``hf-kvret report``: pages with table, picture and command, and clear errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.cli import main
from hf_kvret.lab.evaluate.tasks import TASKS
from hf_kvret.lab.report.outputs import write_table
from hf_kvret.lab.report.report import write_report
from hf_kvret.lab.report.results import Results, _cell_checksum

MEASUREMENTS = {f"eval {name}": task for name, task in TASKS.items()}


def _ruler(folder: Path) -> Path:
    path = folder / "mine.json"
    results = Results("eval ruler", {"model": "m", "samples": 2}, path)
    for cache, score, read in (("full", 100.0, 1.0), ("paris", 50.0, 0.02)):
        cell = {"cache": cache, "task": "vt", "length": 4096, "questions": "inside"}
        found = {"score": score, "read_ratio": read, "step_bytes": 4, "full_bytes": 100}
        results.add(cell, found)
    return path


def _sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The same with right checksums of its cells."""
    above = content["checksum"]
    cells = [entry | {"checksum": _cell_checksum(entry, above)} for entry in content["cells"]]
    return content | {"cells": cells}


def test_a_page_has_table_picture_command_and_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ruler(tmp_path)
    (tmp_path / "mine.notes.txt").write_text("What stands out.\n")
    (tmp_path / "other.json").write_text(json.dumps({"name": "demo", "results": []}))
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "mine.md").read_text()
    assert "| vt             | 100.0" in page and "| 50.0" in page and "What stands out." in page
    assert "threads, no GPU" in page or "threads, NVIDIA" in page
    assert "transformers 5." in page and "model m, samples 2." in page
    assert (tmp_path / "images" / "mine.png").read_bytes().startswith(b"\x89PNG")
    overview = (tmp_path / "overview.md").read_text()
    assert "[mine](mine.md)" in overview and "full, paris" in overview
    assert (tmp_path / "images" / "overview.png").is_file()
    assert not (tmp_path / "other.md").exists()
    printed = capsys.readouterr().out
    assert f"skipped {tmp_path / 'other.json'}: no results of hf-kvret demo" in printed
    # Pages of ours are made anew.
    assert main(["report", str(tmp_path)]) == 0


def test_pages_of_others_are_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ruler(tmp_path)
    for name in ("mine.md", "overview.md"):
        (tmp_path / name).write_text("# Mine\n")
        assert main(["report", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f"page {tmp_path / name} holds something else" in error
        assert "move the file, or give another DIR" in error
        assert (tmp_path / name).read_text() == "# Mine\n"
        (tmp_path / name).unlink()
    (tmp_path / "images").write_text("")
    assert main(["report", str(tmp_path)]) == 2
    assert "images is a file: give a folder" in capsys.readouterr().err


def test_pages_and_pictures_are_tried_before_the_first_is_written(tmp_path: Path) -> None:
    _ruler(tmp_path)
    for name in ("mine.md", "images/mine.png", "images/overview.png"):
        place = tmp_path / name
        place.mkdir(parents=True)
        with pytest.raises(ValueError, match=f"{place} is a folder"):
            write_report(tmp_path, MEASUREMENTS)
        place.rmdir()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".md", ".png")]


def test_a_table_in_the_place_of_a_page_is_replaced(tmp_path: Path) -> None:
    write_table(_ruler(tmp_path).with_suffix(".md"), "| a |\n| - |")
    write_report(tmp_path, MEASUREMENTS)
    assert "This page is made by" in (tmp_path / "mine.md").read_text()


def test_mistakes_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        write_report(tmp_path / "none", MEASUREMENTS)
    with pytest.raises(FileNotFoundError, match="has no result file"):
        write_report(tmp_path, MEASUREMENTS)
    path = _ruler(tmp_path)
    with pytest.raises(NotADirectoryError, match="is a file: give the folder that holds it"):
        write_report(path, MEASUREMENTS)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "mine.json").rename(tmp_path / "mine.away")
    with pytest.raises(FileNotFoundError, match=r"no result file \(but list.json\)"):
        write_report(tmp_path, MEASUREMENTS)
    (tmp_path / "mine.away").rename(path)
    # A number may be missing though the checksums are right.
    content = json.loads(path.read_text())
    del content["cells"][0]["result"]["score"]
    path.write_text(json.dumps(_sealed(content)))
    with pytest.raises(ValueError, match=r"mine.json has a damaged cell, full vt .*no 'score'\)"):
        write_report(tmp_path, MEASUREMENTS)
    content["cells"][0] = {"cell": {}}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"mine.json has a cell without a cache"):
        write_report(tmp_path, MEASUREMENTS)
    assert not list(tmp_path.glob("*.md"))


def test_files_of_others_are_skipped_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ruler(tmp_path)
    (tmp_path / "tsconfig.json").write_text("{ // no JSON")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "book.json").write_text(json.dumps({"cells": [], "nbformat": 4}))
    os.mkfifo(tmp_path / "pipe.json")
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for name, reason in (
        ("tsconfig", "not JSON"),
        ("deep", "not JSON"),
        ("folder", "a folder"),
        ("link", "it can't be read (No such file or directory)"),
        ("book", "no results of hf-kvret demo, eval, tune or bench"),
        ("pipe", "no ordinary file"),
    ):
        assert f"skipped {tmp_path / name}.json: {reason}\n" in printed
    assert f"wrote {tmp_path / 'mine.md'}\n" in printed


def test_damaged_results_are_named_and_the_others_have_their_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(_ruler(tmp_path).read_text())
    whole = json.dumps(content)
    content["cells"][1]["result"]["score"] = {"no": "number"}
    (tmp_path / "changed.json").write_text(json.dumps(content))
    (tmp_path / "wrong.json").write_text(json.dumps(_sealed(content)))
    (tmp_path / "cut.json").write_text(whole[:-2])
    (tmp_path / "odd.json").write_text(whole.replace('"environments": [', '"environments": [3, '))
    Results("eval weather", {}, tmp_path / "new.json").add({"cache": "full"}, {})
    assert main(["report", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    for name, reason in (
        ("changed", "was changed: the cell cache paris, task vt, length 4096"),
        ("wrong", "has a damaged cell, paris vt 4096 inside ("),
        ("cut", "is not JSON"),
        ("odd", "has a damaged entry among its environments"),
        ("new", "holds 'eval weather', which this version does not know"),
    ):
        assert f"hf-kvret: error: {tmp_path / name}.json {reason}" in captured.err
        assert not (tmp_path / f"{name}.md").exists()
    assert f"wrote {tmp_path / 'mine.md'}\n" in captured.out


def test_a_reader_that_is_gone_is_no_error(tmp_path: Path) -> None:
    _ruler(tmp_path)
    command = [sys.executable, "-m", "hf_kvret.cli", "report", str(tmp_path)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 0 and "BrokenPipe" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


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
    report = write_report(_listed(tmp_path, SHOWN), MEASUREMENTS)
    assert [page.name for page in report.pages] == ["speed.md", "third.md"]
    page = (tmp_path / "speed.md").read_text()
    assert page.startswith(
        "# How fast is it?\n\nIt is fast.\n\n## Mine\n\n| task | paris, 4096 inside |"
    )
    mine, other = page.split("## Other")
    assert "| vt   | 50.0" in mine and "100.0" not in mine and "cold rows" not in mine
    assert "100.0" in other and "cold rows read" in other
    assert "(images/mine.png)" in mine and "[mine.json](mine.json)" in mine
    assert (tmp_path / "third.md").read_text().startswith("# eval ruler: third\n\n| task")


def test_a_listed_result_that_is_damaged_is_left_out(tmp_path: Path) -> None:
    content = json.loads(_ruler(tmp_path).read_text())
    content["cells"][1]["result"]["score"] = {"no": "number"}
    (tmp_path / "other.json").write_text(json.dumps(content))
    report = write_report(_listed(tmp_path, SHOWN), MEASUREMENTS)
    assert list(report.failed) == [tmp_path / "other.json"]
    assert "## Other" not in (tmp_path / "speed.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("= [", "= = [", "pages.toml is damaged: .*line 4"),
        ('result = "other"', 'result = "none"', "names none: no such result file"),
        ("heading", "head", "damaged: .*'head'; in TOML a page has"),
        ("title", "name", "damaged: .*'title'"),
        ('"task"', '"weather"', r"mine has no columns \['weather'\]"),
        ("^vt", "(vt", "damaged: .*unterminated subpattern"),
        ('["task", "paris, 4096 inside"]', '"task"', "columns of mine are a text, not a list"),
        ("^vt", "^cwe", r"mine has no columns .* match \^cwe"),
    ],
)
def test_mistakes_in_the_list_of_pages_are_named(
    old: str, new: str, words: str, tmp_path: Path
) -> None:
    _ruler(tmp_path).with_name("other.json").write_bytes((tmp_path / "mine.json").read_bytes())
    with pytest.raises(ValueError, match=words):
        write_report(_listed(tmp_path, SHOWN.replace(old, new)), MEASUREMENTS)
    assert not list(tmp_path.glob("*.md"))
