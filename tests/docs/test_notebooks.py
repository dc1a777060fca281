"""The notebooks of the examples keep what a run of them showed, and name what is there.

`.ci/docs` runs them; here they are read.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import dataclasses
import hashlib
import re
import shlex
from pathlib import Path
from typing import Any

import nbformat
import pytest

import hf_kvret
from hf_kvret.cli import make_parser

from .pages import ROOT, site_tool
from .test_pages import anchors, unknown_names

PATHS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


notebooks = site_tool("notebooks")


def code(notebook: dict[str, Any]) -> str:
    """All code cells as one text, without IPython's own lines."""
    cells = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    lines = "\n".join(map(notebooks.source, cells)).splitlines()
    return "\n".join(re.sub(r"^( *)[%!].*", r"\1pass", line) for line in lines)


def settings(tree: ast.Module) -> dict[str, Any]:
    """The variables in capitals that a notebook begins with."""
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.isupper()
        and isinstance(node.value, ast.Constant)
    }


def commands(tree: ast.Module) -> list[list[str]]:
    """The arguments of each ``command``, the notebook's own variables put in."""
    results, names = [], {name: value or name for name, value in settings(tree).items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "command":
            expression = compile(ast.Expression(node.value), "<command>", "eval")
            results.append(shlex.split(eval(expression, dict(names))))
    return results


def unknown_options(tree: ast.Module) -> list[str]:
    """Names of options, of caches and in ``options`` or ``cache_config``, that no method has."""
    classes = hf_kvret.registered_methods().values()
    names = {field.name for one in classes for field in dataclasses.fields(one.Config)}
    names |= {"config", "model"}
    # Those of configs that the notebook makes.
    names |= {
        ast.unparse(field.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    }
    arguments, makes = [], re.compile(r"Cache(\.from_pretrained)?$|\.fork$")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and makes.search(ast.unparse(node.func)):
            arguments += [one.arg for one in node.keywords if one.arg]
        if isinstance(node, ast.keyword | ast.Assign) and isinstance(node.value, ast.Dict):
            name = node.arg if isinstance(node, ast.keyword) else ast.unparse(node.targets[0])
            if name in ("options", "cache_config", "shared"):
                arguments += [ast.literal_eval(key) for key in node.value.keys if key is not None]
    return [name for name in arguments if name not in names]


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_there_are_notebooks_and_the_page_names_them() -> None:
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert len(PATHS) >= 4
    assert [one.name for one in PATHS if f"notebooks/{one.name})" not in page] == []


def test_a_notebook_is_valid_and_keeps_the_outputs_of_one_run(path: Path) -> None:
    notebook = notebooks.read(path)
    nbformat.validate(notebook, version=4)
    assert notebooks.faults(notebook) == []


def test_its_first_cell_says_what_is_asked_and_what_is_installed(path: Path) -> None:
    first = next(one for one in notebooks.read(path)["cells"] if one["cell_type"] == "code")
    assert {"MODEL", "SOURCE"} <= set(settings(ast.parse(code({"cells": [first]}))))
    assert re.search(r"%pip install .*\{SOURCE\}", notebooks.source(first))


def test_the_first_cell_can_run_again(path: Path, tmp_path: Path) -> None:
    """From the notebooks' folder it goes to the checkout, and stays there."""
    first = next(one for one in notebooks.read(path)["cells"] if one["cell_type"] == "code")
    folder = tmp_path / "hf_kvret" / "examples" / "notebooks"
    folder.mkdir(parents=True)
    (tmp_path / "hf_kvret" / "pyproject.toml").touch()
    for start, end in ((folder, folder.parents[1]), (tmp_path, tmp_path)):
        with contextlib.chdir(start):
            for _ in range(2):
                exec(code({"cells": [first]}), {})
            assert Path.cwd() == end


def test_its_text_is_the_one_that_its_outputs_are_of(path: Path) -> None:
    """The hash that the run printed is that of the text that lies here now."""
    notebook = notebooks.read(path)
    arguments = settings(ast.parse(code(notebook)))
    name = arguments.get("TEXT", arguments.get("BOOK"))
    printed = [one for cell in notebook["cells"] for one in notebooks.texts(cell)]
    hashes = re.findall(r"sha256 (\w+)", "\n".join(printed))
    if name is None:
        assert not hashes
        return
    text = (ROOT / name).read_text(encoding="utf-8")
    message = f"{len(text):,} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    again = "run python docs/site/notebooks.py --write"
    assert hashes and message in "\n".join(printed), again


def test_page_and_notebooks_say_the_same_of_how_long_they_take(path: Path) -> None:
    first = notebooks.source(notebooks.read(path)["cells"][0])
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    message = re.findall(r"akes? (at most \w+ minutes on two idle cores)", f"{first}\n{page}")
    assert len(message) == 2 and len(set(message)) == 1


def test_what_it_names_is_there(path: Path) -> None:
    text = code(notebooks.read(path))
    tree = ast.parse(text)
    assert not unknown_names(text)
    assert not unknown_options(tree)
    for command in commands(tree):
        make_parser().parse_args(command)


def test_its_links_lead_somewhere(path: Path) -> None:
    cells = [one for one in notebooks.read(path)["cells"] if one["cell_type"] == "markdown"]
    for target in LINK.findall("\n".join(map(notebooks.source, cells))):
        file, _, anchor = target.partition("#")
        goal = (path.parent / file).resolve()
        assert goal.is_file(), target
        assert not anchor or anchor in anchors(goal), target


def test_names_and_options_that_are_not_there_are_noticed() -> None:
    tree = ast.parse(
        "MODEL = 'needle'\n"
        "command = f'eval niah --model {MODEL} --depth 3'\n"
        "options = {'top_k': 4, 'topk': 4}\n"
        "model.generate(cache_config={'dense_bellow': 0})\n"
        "hf_kvret.ParisKVCache(config=model.config, recnt=2)\n"
    )
    assert sorted(unknown_options(tree)) == ["dense_bellow", "recnt", "topk"]
    assert commands(tree) == [["eval", "niah", "--model", "needle", "--depth", "3"]]


def cell(number: int | None = 1, code: str | list[str] = "f()", **output: Any) -> dict[str, Any]:
    """A code cell with one output."""
    shown = output or {"output_type": "stream", "name": "stdout", "text": "1\n"}
    return {
        "cell_type": "code", "id": "a", "metadata": {}, "source": code,
        "execution_count": number, "outputs": [{"output_type": "stream", **shown}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (cell(), None),
        (cell(code="a = 1 / 2  # see https://example.org/home/x, and/or tmp/x"), None),
        (cell(number=None), "was run as None"),
        (cell(number=7), "was run as 7"),
        (cell(output_type="error", ename="ValueError", evalue="no"), "ended in ValueError: no"),
        (cell(name="stderr", text="50%"), "keeps bars or warnings"),
        (cell(code="open('/home/me/x')"), "names a folder of a machine"),
        (cell(text=["wrote ", "/tmp/x.png"]), "names a folder of a machine"),
        (cell(data={"text/plain": "'C:\\me'"}), "names a folder of a machine"),
        (cell(data={"image/png": ""}), "nothing was printed"),
        (cell(data={"image/png": "x" * 200_001}), "bytes: at most"),
    ],
)
def test_faults_of_outputs_are_seen(wrong: dict[str, Any], message: str | None) -> None:
    results = notebooks.faults({"cells": [wrong]})
    assert results == [] if message is None else any(message in one for one in results)


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path: Path) -> None:
    drawn = {"image/png": base64.b64encode(b"png").decode(), "text/plain": "<Image>"}
    cells = [
        {"cell_type": "markdown", "source": ["# A\n", "text"]},
        cell(),
        cell(2, "g()", output_type="display_data", data=drawn),
    ]
    page = notebooks.as_markdown({"cells": cells}, ROOT / "examples" / "x.ipynb", tmp_path)
    first, _, second = page.partition("```python\ng()\n```\n\n")
    assert first == "# A\ntext\n\n```python\nf()\n```\n\n```text\n1\n```\n\n"
    assert second.startswith("![what the cell drew](x-1.png)\n")
    assert (tmp_path / "x-1.png").read_bytes() == b"png"
