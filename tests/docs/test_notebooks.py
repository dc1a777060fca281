"""The notebooks of the examples keep what a run of them showed, and name what is there.

`.ci/docs` runs them; here they are read.
"""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from .pages import ROOT, site_tool
from .test_pages import LINK, anchors, unknown_names

PATHS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))

notebooks = site_tool("notebooks")


def code(notebook: dict[str, Any]) -> str:
    """All code cells as one text, without IPython's own lines."""
    cells = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    lines = "\n".join(map(notebooks.source, cells)).splitlines()
    return "\n".join(re.sub(r"^( *)[%!].*", r"\1pass", line) for line in lines)


def test_the_page_names_every_notebook() -> None:
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert len(PATHS) >= 4
    assert [one.name for one in PATHS if f"notebooks/{one.name})" not in page] == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_outputs_of_one_run_and_names_what_is_there(path: Path) -> None:
    notebook = notebooks.read(path)
    nbformat.validate(notebook, version=4)
    assert notebooks.faults(notebook) == []
    text = code(notebook)
    assert re.search(r"^MODEL = ", text, re.M) and re.search(r"^SOURCE = ", text, re.M)
    assert not unknown_names(text)
    cells = [one for one in notebook["cells"] if one["cell_type"] == "markdown"]
    for target in LINK.findall("\n".join(map(notebooks.source, cells))):
        file, _, anchor = target.partition("#")
        goal = (path.parent / file).resolve()
        assert goal.is_file(), target
        assert not anchor or anchor in anchors(goal), target


def cell(number: int | None = 1, code: str = "f()", **output: Any) -> dict[str, Any]:
    """A code cell with one output."""
    shown = output or {"output_type": "stream", "name": "stdout", "text": "1\n"}
    return {
        "cell_type": "code", "id": "a", "metadata": {}, "source": code,
        "execution_count": number, "outputs": [{"output_type": "stream", **shown}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (cell(code="a = 1 / 2  # see https://example.org/home/x, and/or tmp/x"), None),
        (cell(number=7), "was run as 7"),
        (cell(output_type="error", ename="ValueError", evalue="no"), "ended in ValueError: no"),
        (cell(name="stderr", text="50%"), "keeps bars or warnings"),
        (cell(text=["wrote ", "/tmp/x.png"]), "names a folder of a machine"),
        (cell(data={"image/png": ""}), "nothing was printed"),
        (cell(data={"image/png": "x" * 200_001}), "bytes: at most"),
    ],
)
def test_faults_of_outputs_are_seen(wrong: dict[str, Any], message: str | None) -> None:
    results = notebooks.faults({"cells": [wrong]})
    assert results == [] if message is None else any(message in one for one in results)
