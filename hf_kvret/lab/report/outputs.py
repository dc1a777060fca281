"""Where results are written: tried before the work, so that none is lost at its end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

from hf_kvret.lab.report.plots import require_matplotlib
from hf_kvret.lab.report.results import Results, check_results, naming_damage
from hf_kvret.saved.folder import replace_file
from hf_kvret.saved.identity import printable

PICTURES = (".png", ".svg", ".pdf")
_TABLE_MARK = "<!-- This table is written by hf-kvret. -->"
_PAGE_MARK = "This page is made by `hf-kvret "


def page_mark(command: str) -> str:
    """The last line of a page that a command of hf-kvret makes, and may replace."""
    return f"{_PAGE_MARK}{command}`."


def check_outputs(options: Any, measurement: Any) -> None:
    """Try all files and folders that a measurement will write; nothing is left.

    These are ``--json``, ``--plot`` with the pictures beside it, ``--table``, and a task's folders.

    Raises:
        ValueError: a path that can't be written, a picture of unknown type, one file for two
            options, a file that holds something else than what would replace it, or results
            with a damaged cell.
        ModuleNotFoundError: a picture without matplotlib.
    """
    _check_distinct(options, measurement)
    if options.json is not None:
        check_file("--json", options.json, replaced=True)
        if check_results(options.json, measurement.title()):
            results = Results.load(options.json)
            with naming_damage(measurement, results, options.json):
                if len(results):
                    measurement.table(results)
    if options.plot is not None:
        for picture in measurement.pictures(options.plot):
            check_picture("--plot", picture)
    if options.table is not None:
        check_file("--table", options.table)
        check_own("--table", options.table)
    for option, folder in measurement.folders().items():
        check_folder(option, folder)


def _check_distinct(options: Any, measurement: Any) -> None:
    """ValueError where two of ``--json``, ``--plot`` and ``--table`` name one file.

    The pictures that ``measurement`` writes beside ``--plot`` count too.
    """
    pictures = measurement.pictures(options.plot) if options.plot else []
    files = {"--json": [options.json], "--plot": pictures, "--table": [options.table]}
    paths = [(option, path) for option, some in files.items() for path in some if path is not None]
    for (one, first), (other, second) in combinations(paths, 2):
        if _same_file(first, second):
            raise ValueError(f"{one} and {other} are both {second}: give each its own file")


def check_file(option: str, path: Path, *, replaced: bool = False) -> None:
    """ValueError where no file can be written at ``path``; what is there stays as it is.

    ``replaced``: a new file is written beside it and takes its place.
    """
    with _refusing(option, path, "file"):
        if path.is_dir():
            raise ValueError(f"{option} {path} is a folder: give a file in it")
        if path.exists() and not path.is_file():
            raise ValueError(f"{option} {path} is no ordinary file: give another one")
        with _folders(path.parent):
            if path.exists():
                with path.open("r+b"):
                    pass
            else:
                with path.open("xb"):
                    pass
                path.unlink()
            if replaced:
                _try_folder(path.parent)


def check_picture(option: str, path: Path) -> None:
    """As ``check_file``, and the ending must be one of ``PICTURES``.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"{option} {path}: its name must end in {', '.join(PICTURES)}")
    check_file(option, path)
    require_matplotlib()


def check_folder(option: str, path: Path) -> None:
    """ValueError where ``path`` is no folder that files can be written to, and can't become one."""
    with _refusing(option, path, "folder"):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{option} {path} is a file: give a folder")
        with _folders(path):
            _try_folder(path)


def check_own(
    option: str, path: Path, way_out: str = "give another file, or delete this one"
) -> None:
    """ValueError for a text at ``path`` that is no table or page of ours.

    Ours have a mark. Tables had none at first: a text of table rows alone is taken for one of them.
    """
    if not path.is_file():
        return
    with _refusing(option, path, "file"):
        text = path.read_text(encoding="utf-8", errors="replace")
    rows = all(line.startswith("|") for line in text.splitlines() if line.strip())
    if not rows and _TABLE_MARK not in text and _PAGE_MARK not in text:
        raise ValueError(
            f"{option} {path} holds something else than what hf-kvret wrote, and would be "
            f"replaced: {way_out}"
        )


def write_table(path: Path, table: str) -> None:
    """Write a markdown table with the mark by which ``check_outputs`` knows it again."""
    replace_file(path, f"{table}\n\n{_TABLE_MARK}\n".encode())


def write_outputs(options: Any, measurement: Any, results: Any) -> None:
    """Write table and picture as the options say, and name every file on stdout."""
    if options.table:
        with naming_damage(measurement, results, options.json):
            table = measurement.table(results)
        write_table(options.table, table)
        print(f"wrote {printable(str(options.table))}")
    if options.plot:
        with naming_damage(measurement, results, options.json):
            measurement.plot(options.plot, results)
        print(f"wrote {printable(str(options.plot))}")
    if options.json:
        print(f"results are in {printable(str(options.json))}")


def _same_file(one: Path, other: Path) -> bool:
    """Whether two paths name one file, by whatever folders, links or letter case."""
    try:
        return one.resolve() == other.resolve() or one.samefile(other)
    except OSError:
        # Whether a path can be used at all is said by ``check_file``.
        return False


@contextmanager
def _refusing(option: str, path: Path, thing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"{option} {path} can't be written ({reason}): give another {thing}"
        ) from error


@contextmanager
def _folders(folder: Path) -> Iterator[None]:
    """``folder`` and its parents exist inside, and those that did not are gone afterwards."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    new: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            new.append(path)
        yield
    finally:
        for path in reversed(new):
            path.rmdir()


def _try_folder(folder: Path) -> None:
    """Make a file of a new name in ``folder``, and delete it."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".unfinished-"):
        pass
