"""The pages of results: ``python docs/site/report.py`` makes those of ``docs/results``.

``pages.toml`` there says which result files stand on a page, and what is shown of their tables. The
text of ``NAME.notes.txt`` stands above them. Pictures are in ``images``.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_kvret.lab.bench.parser import MEASUREMENTS
from hf_kvret.lab.evaluate.demo import Demo
from hf_kvret.lab.evaluate.measurement import Measurement
from hf_kvret.lab.evaluate.tasks import TASKS
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.report.results import Results
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.lab.tune.command import Tune
from hf_kvret.saved.folder import replace_file

RESULTS = Path(__file__).parents[1] / "results"
PAGES_FILE = "pages.toml"
_PAGE_MARK = "This page is made by `python docs/site/report.py`."
_COMMANDS: dict[str, type[Measurement]] = {
    **{"demo": Demo, "tune": Tune},
    **{f"eval {name}": task for name, task in TASKS.items()},
    **MEASUREMENTS,
}
EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "eval assumptions": "studies/assumptions.py",
    "eval exact-answers": "studies/exact_answers.py",
    "eval literal": "studies/literal.py",
    "eval paris-stages": "studies/paris_stages.py",
    "bench host-attention": "benchmarks/bench_host_attention.py",
    "bench kernels": "benchmarks/bench_kernels.py",
}
"""Measurements that are scripts of the examples, by the name in their result files."""


class Part(NamedTuple):
    """A result on a page, by the name of its file, and what is shown of it."""

    result: str
    heading: str = ""
    columns: Sequence[str] = ()
    """Headers; none for all."""
    rows: str = ""
    """A regular expression, searched for in a row's cells as joined by ``|``."""


class Page(NamedTuple):
    """A question, and the results that answer it."""

    title: str
    parts: list[Part]


def measurement_of(name: str) -> type[Measurement]:
    """The measurement that wrote results of that ``name``."""
    return load_measurement(name) if name in SCRIPTS else _COMMANDS[name]


def command_line(title: str) -> str:
    """The command that runs a script."""
    return f"python examples/{SCRIPTS[title]}"


def load_measurement(title: str) -> type[Measurement]:
    """The measurement of a script."""
    script = EXAMPLES / SCRIPTS[title]
    sys.path.insert(0, str(script.parent))
    try:
        return importlib.import_module(script.stem).MEASUREMENT
    finally:
        sys.path.remove(str(script.parent))


def write_report(folder: Path) -> list[Path]:
    """Write the pages of ``folder``, and the pictures of its results; returns the pages.

    Raises:
        ValueError: a page written by hand where one of ours would be; a ``pages.toml`` that names
            what is not there, or not all result files.
    """
    loaded = {path.stem: Results.load(path) for path in sorted(folder.glob("*.json"))}
    pages = listed_pages(folder, loaded)
    (folder / "images").mkdir(exist_ok=True)
    for name, results in tqdm(loaded.items(), unit="result"):
        measurement_of(results.name).plot(folder / "images" / f"{name}.png", results)
    return [_write_page(folder, name, page, loaded) for name, page in sorted(pages.items())]


def _write_page(folder: Path, name: str, page: Page, loaded: dict[str, Results]) -> Path:
    """The notes, then each result."""
    notes = folder / f"{name}.notes.txt"
    texts = [f"# {page.title}"]
    if notes.is_file():
        texts.append(notes.read_text(encoding="utf-8").strip())
    for part in page.parts:
        results = loaded[part.result]
        script = f"Made now by `{command_line(results.name)}`." if results.name in SCRIPTS else ""
        texts += [
            f"## {part.heading}" if part.heading else "",
            shown_tables(measurement_of(results.name).table(results), part),
            *(f"![{results.name}](images/{one.name})" for one in _pictures(folder, part.result)),
            "Made by",
            *_made(results.environments),
            script,
            f"All numbers are in [{part.result}.json]({part.result}.json).",
        ]
    path = folder / f"{name}.md"
    replace_page(path, texts)
    return path


def replace_page(path: Path, texts: Iterable[str]) -> None:
    """Write a page of ``texts``, of which empty ones are left out, and say what made it.

    ValueError for a text at ``path`` that this did not make.
    """
    there = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if there.strip() and _PAGE_MARK not in there:
        raise ValueError(
            f"{path} holds something else than what this wrote, and would be replaced: move it"
        )
    replace_file(path, ("\n\n".join([*filter(None, texts), _PAGE_MARK]) + "\n").encode())


def _pictures(folder: Path, name: str) -> list[Path]:
    """``NAME.png`` and a task's ``NAME-part.png`` beside it, not those of another file."""
    first = folder / "images" / f"{name}.png"
    others = sorted(first.parent.glob(f"{name}-*.png"))
    return [first, *(one for one in others if not (folder / f"{one.stem}.json").is_file())]


def _made(environments: list[dict[str, Any]]) -> list[str]:
    """The commands, each machine with its versions below those that ran on it."""
    commands: dict[str, list[str]] = {}
    for environment in environments:
        versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items())
        machine = (
            f"{environment['processor']}, {environment['threads']} threads, "
            f"{environment['accelerator'] or 'no GPU'}; Python {environment['python']}, {versions}."
        )
        commands.setdefault(machine, []).append(f"    {environment['command']}")
    return [text for machine, some in commands.items() for text in ("\n".join(some), machine)]


def listed_pages(folder: Path, results: Collection[str]) -> dict[str, Page]:
    """The pages in ``folder``'s ``pages.toml`` by name.

    Raises:
        ValueError: the file names other results than ``results``.
        TypeError: an entry is no page: it has a title and parts, each with a result.
    """
    entries = tomllib.loads((folder / PAGES_FILE).read_text(encoding="utf-8"))
    pages = {name: _page(**entry) for name, entry in entries.items()}
    named = {part.result for page in pages.values() for part in page.parts}
    if missing := named - {*results}:
        raise ValueError(f"{PAGES_FILE} names {', '.join(sorted(missing))}: no such result file")
    if unnamed := {*results} - named:
        raise ValueError(f"{PAGES_FILE} has no page for {', '.join(sorted(unnamed))}")
    return pages


def _page(title: str, parts: list[dict[str, Any]], **usual: Any) -> Page:
    """A page; ``usual`` is what parts have that don't say otherwise."""
    return Page(title, [Part(**usual | part) for part in parts])


def shown_tables(text: str, part: Part) -> str:
    """The markdown tables in ``text`` with the columns and rows of ``part``, where they have any.

    Raises:
        ValueError: no table has a column of that name, or a row that matches.
    """
    if not part.columns and not part.rows:
        return text
    blocks: list[str] = []
    seen: set[str] = set()
    for block in text.split("\n\n"):
        if not block.startswith("|"):
            blocks.append(block)
            continue
        header, _, *body = ([*map(str.strip, line[1:-1].split("|"))] for line in block.split("\n"))
        indices = [i for i, name in enumerate(header) if name in part.columns or not part.columns]
        kept = [row for row in body if re.search(part.rows, " | ".join(row))]
        if indices and kept:
            head, *rows = ([row[i] for i in indices] for row in (header, *kept))
            seen |= {*head}
            blocks.append(markdown_table(head, rows))
    missing = [name for name in part.columns if name not in seen]
    if missing or not seen:
        raise ValueError(
            f"{PAGES_FILE}: {part.result} has no columns {missing} with rows that match {part.rows}"
        )
    return "\n\n".join(blocks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    for page in write_report(RESULTS):
        sys.stdout.write(f"wrote {page}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
