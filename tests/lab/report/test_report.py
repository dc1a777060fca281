"""Result files and their pages: finished cells stay, places are tried, tables, plain pictures."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.report import plots
from hf_kvret.lab.report.plots import count_label, plot_front, plot_heat_maps, plot_lines
from hf_kvret.lab.report.results import (
    Results,
    check_file,
    check_folder,
    check_picture,
    read_results,
)

from ...docs.pages import site_tool

CELL = {"cache": "full", "length": 64}


def test_finished_cells_are_found_again(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.json"
    first = Results("eval x", {"seed": 1, "lengths": (1, 2)}, file)
    assert first.find(CELL) is None and len(first) == 0
    first.add(CELL, {"score": 1.5})
    again = Results("eval x", {"lengths": (1, 2), "seed": 1}, file)
    assert again.find({"length": 64, "cache": "full"}) == {"score": 1.5}
    again.add(CELL | {"length": 128}, {"score": float("nan")})
    content = json.loads(file.read_text())
    assert [entry["cell"]["length"] for entry in content["cells"]] == [64, 128]
    assert len(content["environments"]) == 1
    assert {"command", "processor", "versions"} <= content["environments"][0].keys()
    # A cell that somebody took out is measured again.
    del content["cells"][1]
    file.write_text(json.dumps(content))
    # Files of earlier versions may have a number that is none in JSON.
    file.write_text(file.read_text().replace("1.5", "-Infinity"))
    last = Results("eval x", {"seed": 1, "lengths": [1, 2]}, file)
    assert [row for _, row in last] == [{"score": None}]
    assert [path.name for path in file.parent.iterdir()] == ["results.json"]


def test_another_setup_task_or_file_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    Results("eval x", {"seed": 1}, file).add(CELL, {"score": 1})
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"seed was 1, now 2.*give another --json"):
        Results("eval x", {"seed": 2}, file)
    with pytest.raises(ValueError, match="holds results of 'eval x', not of 'eval y'"):
        Results("eval y", {"seed": 1}, file)
    assert file.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="no file"):
        read_results(tmp_path / "none.json")
    kinds = {"{": "line 1 column 2", "[1]": "no JSON object with a cells"}
    kinds |= {'{"format": 2, "cells": []}': "another format"}
    whole = {"name": "eval x", "format": 1, "setup": {}, "environments": [], "cells": []}
    parts = {"setup": [1], "environments": 5, "name": None, "cells": [{"cell": {"a": 1}}]}
    parts |= {"cells ": ["x"]}
    broken = [{**whole, name.strip(): part} for name, part in parts.items()]
    kinds |= {json.dumps(one): "a part of it is missing, or of another kind" for one in broken}
    for content, words in kinds.items():
        file.write_text(content)
        with pytest.raises(ValueError, match=f"no result file that this version .*{words}"):
            Results("eval x", {}, file)
        assert file.read_text() == content


def test_of_two_processes_that_write_one_file_none_drops_what_the_other_finished(
    tmp_path: Path,
) -> None:
    file = tmp_path / "results.json"
    one, other = (Results("eval x", {}, file) for _ in range(2))
    one.add(CELL, {"score": 1})
    before = file.read_bytes()
    with pytest.raises(ValueError, match="another process writes its results"):
        other.add({"cache": "other"}, {"score": 2})
    assert file.read_bytes() == before
    one.add({"cache": "third"}, {"score": 3})
    assert len(Results.load(file)) == 2


def test_published_results_are_read() -> None:
    """Those of 0.1.0 too."""
    files = [path for path in PUBLISHED.rglob("*.json") if b'"cells"' in path.read_bytes()]
    assert sum(len(Results.load(path)) for path in files) > 500


def test_places_that_cant_be_written_are_refused_and_trials_leave_no_file(tmp_path: Path) -> None:
    check_file("--json", tmp_path / "a" / "b.json")
    check_folder("--out", tmp_path / "c")
    check_picture(tmp_path / "x.PNG")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--json .* is a folder: give a file in it"):
        check_file("--json", tmp_path)
    with pytest.raises(ValueError, match="--out: no file can be written to"):
        check_folder("--out", tmp_path / "file")
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg, \.pdf"):
        check_picture(tmp_path / "a.gif")


PUBLISHED = Path(__file__).parents[3] / "docs" / "results"
report = site_tool("report")


def test_published_pages_have_the_tables_of_their_results() -> None:
    pages = report.listed_pages(PUBLISHED, {path.stem for path in PUBLISHED.glob("*.json")})
    for name, page in pages.items():
        text = (PUBLISHED / f"{name}.md").read_text(encoding="utf-8")
        for part in page.parts:
            results = Results.load(PUBLISHED / f"{part.result}.json")
            measurement = report.measurement_of(results.name)
            table = report.shown_tables(measurement.table(results), part)
            picture = f"![{results.name}](images/{part.result}.png)"
            assert f"\n\n{table}\n\n{picture}" in text, f"{name}: {part.result}"


SHOWN = """
[speed]
title = "How fast is it?"
parts = [
    { result = "mine", heading = "Mine", columns = ["task", "paris, 4096 inside"], rows = "^vt" },
    { result = "other", heading = "Other" },
]
"""


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A folder with the results ``mine`` and ``other``, and the list of their page."""
    results = Results("eval ruler", {"model": "m", "samples": 2}, tmp_path / "mine.json")
    for cache, score, read in (("full", 100.0, 1.0), ("paris", 50.0, 0.02)):
        cell = {"cache": cache, "task": "vt", "length": 4096, "questions": "inside"}
        found = {"score": score, "read_ratio": read, "step_bytes": 4, "full_bytes": 100}
        results.add(cell, found)
    (tmp_path / "other.json").write_bytes((tmp_path / "mine.json").read_bytes())
    (tmp_path / "speed.notes.txt").write_text("It is fast.\n")
    (tmp_path / "pages.toml").write_text(SHOWN)
    return tmp_path


def test_a_page_has_notes_tables_pictures_and_commands(listed: Path) -> None:
    page = listed / "speed.md"
    assert report.write_report(listed) == [page]
    text = page.read_text()
    assert text.startswith(
        "# How fast is it?\n\nIt is fast.\n\n## Mine\n\n| task | paris, 4096 inside |"
    )
    mine, other = text.split("## Other")
    assert "| vt   | 50.0" in mine and "100.0" not in mine and "cold rows" not in mine
    assert "100.0" in other and "cold rows read" in other
    assert "(images/mine.png)" in mine and "[mine.json](mine.json)" in mine
    assert "threads, no GPU" in mine or "threads, NVIDIA" in mine
    assert "transformers 5." in mine
    assert (listed / "images" / "mine.png").read_bytes().startswith(b"\x89PNG")
    # Pages of ours are made again, others are not replaced.
    report.write_report(listed)
    page.write_text("Notes of my own.")
    with pytest.raises(ValueError, match=r"speed\.md holds something else"):
        report.write_report(listed)
    assert page.read_text() == "Notes of my own."


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('result = "other"', 'result = "none"', "names none: no such result file"),
        ('result = "other"', 'result = "mine"', "has no page for other"),
        ('"task"', '"weather"', r"mine has no columns \['weather'\]"),
    ],
)
def test_mistakes_in_the_list_of_pages_are_named(
    old: str, new: str, words: str, listed: Path
) -> None:
    (listed / "pages.toml").write_text(SHOWN.replace(old, new))
    with pytest.raises(ValueError, match=words):
        report.write_report(listed)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn, with their layout, in place of files."""
    drawn: list[Any] = []

    def keep(figure: Any, path: Path) -> None:
        figure.canvas.draw()
        drawn.append(figure)

    monkeypatch.setattr(plots, "_save", keep)
    return drawn


def labels(ticks: list[Any]) -> list[str]:
    return [tick.get_text() for tick in ticks]


def test_counts_are_said_in_k_and_m() -> None:
    counts = (1, 256, 1000, 4096, 131_072, 3 * 1024**2, 1536)
    assert [*map(count_label, counts)] == ["1", "256", "1,000", "4K", "128K", "3M", "1,536"]


@pytest.mark.parametrize(
    ("values", "some"),
    [
        ((150.0, 151.0), {"150", "151"}),
        ((0.5, 60), {"0.5", "1", "10", "50"}),
        ((0.002, 30_000), {"0.01", "1", "10,000"}),
    ],
)
def test_logarithmic_axes_show_plain_numbers(
    values: tuple[float, float], some: set[str], figures: list[Any]
) -> None:
    lines = {"paris": ([4096.0, 16_384.0], values)}
    plot_lines(Path("x.png"), lines, title="t", x="x", y="y", log_x=True, log_y=True)
    (axis,) = figures[0].axes
    assert labels(axis.get_xticklabels()) == ["4K", "16K"]
    assert some <= {*labels(axis.get_yticklabels())}
    assert not axis.get_yticklabels(minor=True)


def test_a_front_goes_past_what_is_no_number(figures: list[Any]) -> None:
    points = {"a": (1.0, float("nan")), "b": (2.0, 3.0), "c": (3.0, 4.0), "d": (4.0, 1.0)}
    plot_front(Path("x.png"), points, title="t", x="x", y="y")
    assert figures[0].axes[0].lines[-1].get_xydata().tolist() == [[2.0, 3.0], [4.0, 1.0]]


def test_every_cell_of_a_map_shows_its_number(figures: list[Any]) -> None:
    percents = {("full", 1, 3): 100.0, ("full", 1, 4): 50.0, ("full", 2, 3): 0.0}
    rows, columns = {1: "a", 2: "b"}, {3: "c", 4: "d"}
    plot_heat_maps(Path("x.png"), percents, rows=rows, columns=columns, title="t", x="x", y="y")
    texts = [(text.get_text(), text.get_color()) for text in figures[0].axes[0].texts]
    assert texts == [("100", "white"), ("50", "black"), ("0", "white")]
