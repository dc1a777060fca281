"""Where results are written: tried before the work, so that none is lost at its end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_kvret.evaluation.plots import require_matplotlib
from hf_kvret.evaluation.results import check_results

PICTURES = (".png", ".svg", ".pdf")
_TABLE_MARK = "<!-- This table is written by hf-kvret. -->"


def check_outputs(options: argparse.Namespace, name: str) -> None:
    """Try ``--json``, ``--plot`` and ``--table`` of the measurement ``name``; nothing is left.

    Raises:
        ValueError: a path that can't be written, a picture of unknown kind, one file for two
            options, or a file that holds something else than what would replace it.
        ModuleNotFoundError: a picture without matplotlib.
    """
    check_distinct(options)
    if options.json is not None:
        check_file("--json", options.json, replaced=True)
        check_results(options.json, name)
    if options.plot is not None:
        check_picture("--plot", options.plot)
    if options.table is not None:
        check_file("--table", options.table)
        check_own("--table", options.table, _TABLE_MARK)


def check_distinct(options: argparse.Namespace) -> None:
    """ValueError where two of ``--json``, ``--plot`` and ``--table`` name one file."""
    owners: dict[Path, str] = {}
    for option in ("json", "plot", "table"):
        path: Path | None = getattr(options, option, None)
        if path is None:
            continue
        other = owners.setdefault(path.absolute(), option)
        if other != option:
            raise ValueError(f"--{other} and --{option} are both {path}: give each its own file")


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
            if replaced or not path.exists():
                _try_new(path.with_name(f"{path.name}.new") if replaced else path)


def check_picture(option: str, path: Path) -> None:
    """As ``check_file``, and the ending must be one of ``PICTURES``.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    if path.suffix not in PICTURES:
        raise ValueError(f"{option} {path}: its name must end in {', '.join(PICTURES)}")
    check_file(option, path)
    require_matplotlib()


def check_folder(option: str, path: Path) -> None:
    """ValueError where ``path`` is no folder that files can be written to, and can't become one."""
    with _refusing(option, path, "folder"):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{option} {path} is a file: give a folder")
        with _folders(path):
            _try_new(path / ".hf-kvret.new")


def check_own(option: str, path: Path, mark: str) -> None:
    """ValueError for a text at ``path`` without our ``mark``: it is somebody else's."""
    if not path.is_file() or not path.stat().st_size:
        return
    if mark not in path.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(
            f"{option} {path} holds something else than what hf-kvret wrote, and would be "
            "replaced: give another file, or delete this one"
        )


def check_named_json(option: str, path: Path, name: str) -> None:
    """As ``check_file``; a file that is there must be JSON of our results ``name``."""
    check_file(option, path)
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("name") != name:
        raise ValueError(
            f"{option} {path} holds something else than results of {name}, and would be replaced: "
            "give another file, or delete this one"
        )


def write_table(path: Path, table: str) -> None:
    """Write a markdown table with the mark by which ``check_outputs`` knows it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{table}\n\n{_TABLE_MARK}\n", encoding="utf-8")


def write_outputs(options: argparse.Namespace, measurement: Any, results: Any) -> None:
    """Write table and picture as the options say, and name every file on stdout."""
    if options.table:
        write_table(options.table, measurement.table(results))
        print(f"wrote {options.table}")
    if options.plot:
        measurement.plot(options.plot, results)
        print(f"wrote {options.plot}")
    if options.json:
        print(f"results are in {options.json}")


@contextmanager
def _refusing(option: str, path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"{option} {path} can't be written ({reason}): give another {kind}"
        ) from error


@contextmanager
def _folders(folder: Path) -> Iterator[None]:
    """``folder`` and its parents exist inside, and those that did not are gone afterwards."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    made: list[Path] = []
    try:
        for part in reversed(missing):
            part.mkdir()
            made.append(part)
        yield
    finally:
        for part in reversed(made):
            part.rmdir()


def _try_new(path: Path) -> None:
    """Make a file and delete it; one that is there stays."""
    if path.exists():
        with path.open("ab"):
            return
    with path.open("xb"):
        pass
    path.unlink()
