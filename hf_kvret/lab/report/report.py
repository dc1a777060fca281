"""``hf-kvret report DIR``: result files become pages with tables, pictures and their commands.

A file ``pages.toml`` beside them says which stand on one page, and what of their tables.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_kvret.lab.evaluate.measurement import Measurement
from hf_kvret.lab.program.arguments import file_path
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.program.scripts import SCRIPTS, command_line, load_measurement
from hf_kvret.lab.report.outputs import check_folder, replace_page
from hf_kvret.lab.report.plots import require_matplotlib
from hf_kvret.lab.report.results import Results, is_results
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.saved.identity import printable

PAGES_FILE = "pages.toml"
_Known = Mapping[str, type[Measurement]]


class Part(NamedTuple):
    """A result on a page, by the name of its file, and what is shown of it."""

    result: str
    heading: str = ""
    columns: Sequence[str] = ()
    """Headers; none for all."""
    rows: str = ""
    """A regular expression, searched for in a row's cells as joined by ``|``."""


class Page(NamedTuple):
    """A question, and the results that answer it; ``has_setup``: with their set-ups."""

    title: str
    parts: list[Part]
    has_setup: bool = False


def add_report_parser(commands: argparse._SubParsersAction, measurements: _Known) -> None:
    """Add ``report`` to the program's commands; ``measurements`` by the name in their files."""
    parser = commands.add_parser(
        "report",
        help="make pages with tables and pictures of result files",
        description="Make a page NAME.md of every NAME.json in DIR that hf-kvret demo, eval or "
        "bench wrote, with its table, picture, command, machine and versions. The text of "
        "NAME.notes.txt stands above the table. A file pages.toml puts several results on one "
        "page. Other JSON files are skipped, and named.",
    )
    parser.add_argument("folder", type=file_path, metavar="DIR", help="holds the result files")
    parser.set_defaults(run=lambda options: _report(options.folder, measurements))


def _report(folder: Path, measurements: _Known) -> int:
    for page in write_report(folder, measurements):
        print(f"wrote {printable(str(page))}")
    return 0


def write_report(folder: Path, measurements: _Known) -> list[Path]:
    """Write the pages of every result file in ``folder``; returns them.

    Prints which JSON files it skips: those of others, and results of a command that this version
    doesn't have.

    Raises:
        FileNotFoundError: no such folder, or no result file in it.
        ValueError: a folder that can't be written to; a page of somebody else where ours would be;
            a ``pages.toml`` that names what is not there.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: give the one that holds the result files")
    # Studies join them when one of their files is found.
    measurements, loaded = dict(measurements), {}
    for path in sorted(folder.glob("*.json")):
        results = Results.load(path) if is_results(path) else None
        name = "" if results is None else results.name
        if name in SCRIPTS and name not in measurements:
            measurements[name] = load_measurement(name)
        if results is not None and name in measurements:
            loaded[path.stem] = results
        else:
            why = f"this version does not know {name!r}" if name else "no results of hf-kvret"
            print(f"skipped {printable(f'{path}: {why}')}")
    if not loaded:
        raise FileNotFoundError(
            f"{folder} has no result file: make one with hf-kvret eval TASK --json "
            f"{folder}/NAME.json"
        )
    pages = listed_pages(folder, loaded)
    on_page = {part.result for page in pages.values() for part in page.parts}
    pages |= {
        name: Page(f"{results.name}: {name}", [Part(name)], has_setup=True)
        for name, results in loaded.items()
        if name not in on_page
    }
    check_folder("DIR", folder / "images")
    require_matplotlib()
    for name, results in tqdm(loaded.items(), unit="result"):
        measurements[results.name].plot(_picture(folder, name), results)
    return [_write_page(folder, name, pages[name], loaded, measurements) for name in sorted(pages)]


def _write_page(
    folder: Path, name: str, page: Page, loaded: dict[str, Results], measurements: _Known
) -> Path:
    """The notes, then each result."""
    notes = folder / f"{name}.notes.txt"
    texts = [f"# {page.title}"]
    if notes.is_file():
        texts.append(notes.read_text(encoding="utf-8").strip())
    for part in page.parts:
        results = loaded[part.result]
        script = f"Made now by `{command_line(results.name)}`." if results.name in SCRIPTS else ""
        setup = ", ".join(f"{name} {value}" for name, value in results.setup.items())
        texts += [
            f"## {part.heading}" if part.heading else "",
            shown_tables(measurements[results.name].table(results), part),
            *(f"![{results.name}](images/{one.name})" for one in _pictures(folder, part.result)),
            "Made by",
            *_made(results.environments),
            script,
            f"Set-up: {setup}." if page.has_setup else "",
            f"All numbers are in [{part.result}.json]({part.result}.json).",
        ]
    path = folder / f"{name}.md"
    replace_page(path, texts, "report")
    return path


def _picture(folder: Path, name: str) -> Path:
    return folder / "images" / f"{name}.png"


def _pictures(folder: Path, name: str) -> list[Path]:
    """``NAME.png`` and a task's ``NAME-part.png`` beside it, not those of another file."""
    first = _picture(folder, name)
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
    """The pages in ``folder``'s ``pages.toml`` by name; none where there is no such file.

    Raises:
        ValueError: the file is no TOML, or names a result that is none of ``results``.
        TypeError: an entry is no page: it has a title and parts, each with a result.
    """
    path = folder / PAGES_FILE
    if not path.is_file():
        return {}
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    pages = {name: _page(**entry) for name, entry in entries.items()}
    missing = {part.result for page in pages.values() for part in page.parts} - {*results}
    if missing:
        raise ValueError(f"{path} names {', '.join(sorted(missing))}: no such result file")
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
