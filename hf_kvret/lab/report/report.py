"""``hf-kvret report DIR``: result files become pages with tables, pictures and their commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hf_kvret.lab.evaluate.measurement import Measurement
from hf_kvret.lab.program.arguments import file_path
from hf_kvret.lab.program.help_text import HelpFormatter
from hf_kvret.lab.program.progress import tqdm
from hf_kvret.lab.program.scripts import SCRIPTS, command_line, load_measurement
from hf_kvret.lab.report.outputs import check_file, check_folder, check_own, page_mark
from hf_kvret.lab.report.pages import Page, Part, listed_pages, shown_tables
from hf_kvret.lab.report.plots import plot_points, require_matplotlib
from hf_kvret.lab.report.results import (
    Results,
    files_of,
    naming_damage,
    shared_file,
    why_no_results,
)
from hf_kvret.lab.report.tables import markdown_table
from hf_kvret.saved.folder import replace_file
from hf_kvret.saved.identity import printable


def add_report_parser(commands: argparse._SubParsersAction, measurements: _Known) -> None:
    """Add ``report`` to the program's commands; ``measurements`` by the name in their files."""
    parser = commands.add_parser(
        "report",
        help="make pages with tables and pictures of result files",
        description="Make a page NAME.md of every NAME.json in DIR that hf-kvret demo, eval or "
        "bench wrote, with its table, picture, command, machine and versions, and overview.md "
        "about all of them. The text of NAME.notes.txt stands above the table. A file pages.toml "
        "puts several results on one page, and then there is no overview. Other JSON files are "
        "skipped, and named; status 1 says that results of ours have no page, and why.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("folder", type=file_path, metavar="DIR", help="holds the result files")
    parser.set_defaults(run=lambda options: _report(options.folder, measurements))


_Known = Mapping[str, type[Measurement]]


class Report(NamedTuple):
    """The outcome of ``write_report``."""

    pages: list[Path]
    """The pages, the overview last, if there is one."""
    skipped: dict[Path, str]
    """JSON of somebody else, with the reason."""
    failed: dict[Path, str]
    """Results without a page, with the reason: they are damaged, or of another version."""


def write_report(folder: Path, measurements: _Known) -> Report:
    """Write the pages of every result file in ``folder``.

    Raises:
        FileNotFoundError: no such folder, or no result file in it.
        NotADirectoryError: ``folder`` is a file.
        ValueError: no result file can be used; a page of somebody else where ours would be; a
            folder that can't be written to; a ``pages.toml`` that names what is not there.
    """
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file: give the folder that holds it")
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    # Studies join them when they are met.
    measurements = dict(measurements)
    reasons: dict[Path, str | None] = {}
    for path in sorted(folder.glob("*.json")):
        # Files of ranks make one page, if there are any of ours among them.
        reason, shared = why_no_results(path), shared_file(path)
        reasons[shared] = reason if reasons.get(shared, reason) is not None else None
    skipped = {path: reason for path, reason in reasons.items() if reason is not None}
    loaded: dict[Path, Results] = {}
    failed: dict[Path, str] = {}
    for path in (path for path, reason in reasons.items() if reason is None):
        try:
            loaded[path] = _load(path, measurements)
        except ValueError as error:
            failed[path] = str(error)
    if failed and not loaded:
        raise ValueError("; ".join(failed.values()))
    if not loaded:
        others = f" (but {', '.join(path.name for path in skipped)})" if skipped else ""
        raise FileNotFoundError(
            f"{folder} has no result file{others}: make one with hf-kvret eval TASK --json "
            f"{folder}/NAME.json"
        )
    listed = listed_pages(folder, {path.stem for path in (*loaded, *failed)})
    on_page = {part.result for page in listed.values() for part in page.parts}
    pages = listed | {
        path.stem: Page(f"{results.name}: {path.stem}", [Part(path.stem)], has_setup=True)
        for path, results in loaded.items()
        if path.stem not in on_page
    }
    _check_pages(folder, [*pages, *([] if listed else ["overview"])], loaded, measurements)
    for name, content in pages.items():
        _texts(folder, name, content, loaded, measurements)
    require_matplotlib()
    for path, results in tqdm(list(loaded.items()), unit="result"):
        measurement = measurements[results.name]
        try:
            with naming_damage(measurement, results, path):
                measurement.plot(_picture(path), results)
        except ValueError as error:
            failed[path] = str(error)
            del loaded[path]
    written = [
        _write_page(folder / f"{name}.md", [f"# {page.title}", *texts, page_mark("report")])
        for name, page in sorted(pages.items())
        if (texts := _texts(folder, name, page, loaded, measurements))
    ]
    if not listed:
        written.append(_overview(folder, loaded, measurements))
    return Report(written, skipped, failed)


def _load(path: Path, measurements: dict[str, Any]) -> Results:
    """The results of a file; ValueError where no table can be made of them."""
    results = Results.load(path)
    if results.name in SCRIPTS and results.name not in measurements:
        try:
            measurements[results.name] = load_measurement(results.name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if results.name not in measurements:
        raise ValueError(
            f"{path} holds {results.name!r}, which this version does not know: "
            f"{', '.join(measurements)}"
        )
    measurement = measurements[results.name]
    with naming_damage(measurement, results, path):
        measurement.table(results)
        measurement.accuracy(results)
    return results


def _check_pages(
    folder: Path, names: list[str], loaded: dict[Path, Results], measurements: _Known
) -> None:
    """Try every page and picture before the first one is written."""
    images = folder / "images"
    check_folder("DIR", folder)
    check_folder("DIR", images)
    for page in (folder / f"{name}.md" for name in names):
        check_file("page", page)
        check_own("page", page, "move the file, or give another DIR")
    check_file("picture", images / "overview.png")
    for path, results in loaded.items():
        for picture in measurements[results.name].pictures(_picture(path)):
            check_file("picture", picture)


def _texts(
    folder: Path, name: str, page: Page, loaded: dict[Path, Results], measurements: _Known
) -> list[str]:
    """The page without its title: the notes, then each result; empty where none was loaded."""
    parts = [part for part in page.parts if folder / f"{part.result}.json" in loaded]
    if not parts:
        return []
    notes = folder / f"{name}.notes.txt"
    texts = [notes.read_text(encoding="utf-8").strip()] if notes.is_file() else []
    for part in parts:
        path = folder / f"{part.result}.json"
        results = loaded[path]
        script = f"Made now by `{command_line(results.name)}`." if results.name in SCRIPTS else ""
        setup = ", ".join(f"{name} {value}" for name, value in results.setup.items())
        files = ", ".join(f"[{file.name}]({file.name})" for file in files_of(path))
        texts += [
            f"## {part.heading}" if part.heading else "",
            shown_tables(measurements[results.name].table(results), part),
            *(f"![{results.name}](images/{one.name})" for one in _pictures(path)),
            "Made by",
            *_made(results.environments),
            script,
            f"Set-up: {setup}." if page.has_setup else "",
            f"All numbers are in {files}.",
        ]
    return [text for text in texts if text]


def _picture(path: Path) -> Path:
    return path.parent / "images" / f"{path.stem}.png"


def _pictures(path: Path) -> list[Path]:
    """``NAME.png`` and a task's ``NAME-part.png`` beside it, not those of another file."""
    first = _picture(path)
    others = sorted(first.parent.glob(f"{first.stem}-*.png"))
    return [first, *(one for one in others if not (path.parent / f"{one.stem}.json").is_file())]


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


def _overview(folder: Path, loaded: dict[Path, Results], measurements: _Known) -> Path:
    rows: list[tuple[str, ...]] = []
    points: dict[str, tuple[float, float]] = {}
    for path, results in loaded.items():
        caches = list(dict.fromkeys(cell["cache"] for cell, _ in results))
        link = f"[{path.stem}]({path.stem}.md)"
        rows.append((link, results.name, str(len(results)), ", ".join(caches)))
        accuracy = measurements[results.name].accuracy(results)
        points |= {f"{path.stem}, {cache}": point for cache, point in accuracy.items()}
    texts = ["# Results", markdown_table(("page", "measured", "cells", "caches"), rows)]
    if points:
        picture = folder / "images" / "overview.png"
        plot_points(
            picture,
            {name: ([100 * x], [100 * y]) for name, (x, y) in points.items()},
            title="answers right against bytes read",
            x="bytes of the cache that a step reads, % of full keys and values",
            y="answers right, %",
        )
        texts.append(f"![answers right against bytes read](images/{picture.name})")
    texts.append(page_mark("report"))
    return _write_page(folder / "overview.md", texts)


def _write_page(page: Path, texts: list[str]) -> Path:
    replace_file(page, ("\n\n".join(texts) + "\n").encode())
    return page


def _report(folder: Path, measurements: _Known) -> int:
    pages, skipped, failed = write_report(folder, measurements)
    lines = [
        *(f"wrote {page}" for page in pages),
        *(f"skipped {path}: {reason}" for path, reason in skipped.items()),
    ]
    try:
        print("\n".join(map(printable, lines)), flush=True)
    except BrokenPipeError:
        # Nobody reads on. What is left in the buffer goes nowhere, so that the exit is silent too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for reason in failed.values():
        print(f"hf-kvret: error: {printable(reason)}", file=sys.stderr)
    return 1 if failed else 0
