"""Where results are written: tried before the work, so that none is lost at its end."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hf_kvret.lab.report.plots import require_matplotlib
from hf_kvret.lab.report.results import read_results
from hf_kvret.saved.folder import replace_file
from hf_kvret.saved.identity import printable

PICTURES = (".png", ".svg", ".pdf")
_TABLE_MARK = "<!-- This table is written by hf-kvret. -->"
_PAGE_MARK = "This page is made by `hf-kvret "


def page_mark(command: str) -> str:
    """The last line of a page that a command of hf-kvret makes, and may replace."""
    return f"{_PAGE_MARK}{command}`."


def check_outputs(options: Any, measurement: Any) -> None:
    """Try all files and folders that a measurement will write; their folders are made.

    These are ``--json``, ``--plot`` with the pictures beside it, ``--table``, and a task's folders.

    Raises:
        ValueError: a path that can't be written, a picture of unknown type, one file for two
            options, or a file that holds something else than what would replace it.
        ModuleNotFoundError: a picture without matplotlib.
    """
    pictures = [] if options.plot is None else measurement.pictures(options.plot)
    files = [*pictures, *(path for path in (options.json, options.table) if path is not None)]
    if len({path.resolve() for path in files}) < len(files):
        names = ", ".join(map(str, files))
        raise ValueError(
            f"--json, --plot and --table would write one file twice ({names}): give each its own"
        )
    if options.json is not None:
        check_file("--json", options.json)
        if options.json.is_file():
            read_results(options.json, measurement.title())
    for picture in pictures:
        if picture.suffix.lower() not in PICTURES:
            raise ValueError(f"--plot {picture}: its name must end in {', '.join(PICTURES)}")
        check_file("--plot", picture)
        require_matplotlib()
    if options.table is not None:
        check_file("--table", options.table)
        check_own(options.table, "give --table another one")
    for option, folder in measurement.folders().items():
        check_folder(option, folder)


def check_file(option: str, path: Path) -> None:
    """ValueError where no file can be written at ``path``; its folder is made."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give a file in it")
    check_folder(option, path.parent)


def check_folder(option: str, path: Path) -> None:
    """Make a folder; ValueError where that fails, or where no file can be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".unfinished-"):
            pass
    except OSError as error:
        raise ValueError(
            f"{option}: no file can be written to {path} ({error.strerror or error}): give another "
            "place"
        ) from error


def check_own(path: Path, way_out: str) -> None:
    """ValueError for a text at ``path`` that is no table or page of ours, which have a mark."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if text.strip() and _TABLE_MARK not in text and _PAGE_MARK not in text:
        raise ValueError(
            f"{path} holds something else than what hf-kvret wrote, and would be replaced: move "
            f"the file, or {way_out}"
        )


def write_outputs(options: Any, measurement: Any, results: Any) -> None:
    """Write table and picture as the options say, and name every file on stdout."""
    if options.table:
        content = f"{measurement.table(results)}\n\n{_TABLE_MARK}\n"
        replace_file(options.table, content.encode())
        print(f"wrote {printable(str(options.table))}")
    if options.plot:
        measurement.plot(options.plot, results)
        print(f"wrote {printable(str(options.plot))}")
    if options.json:
        print(f"results are in {printable(str(options.json))}")
