"""Where results are written: tried before the work, so that none is lost at its end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from hf_kvret.saved.folder import replace_file

_PICTURES = (".png", ".svg", ".pdf")
_PAGE_MARK = "This page is made by `"


def check_picture(path: Path) -> None:
    """ValueError where no picture can be written at ``path``; its folder is made."""
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(f"--plot {path}: its name must end in {', '.join(_PICTURES)}")
    check_file("--plot", path)


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


def replace_page(path: Path, texts: Iterable[str], command: str) -> None:
    """Write a page of ``texts``, of which empty ones are left out, and say which command made it.

    ValueError for a text at ``path`` that no command made.
    """
    there = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if there.strip() and _PAGE_MARK not in there:
        raise ValueError(
            f"{path} holds something else than what a command wrote, and would be replaced: move "
            "the file, or give another folder"
        )
    page = [*filter(None, texts), f"{_PAGE_MARK}{command}`."]
    replace_file(path, ("\n\n".join(page) + "\n").encode())
