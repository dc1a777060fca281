"""Where results are written: tried before the work, so that none is lost at its end."""

from __future__ import annotations

import tempfile
from pathlib import Path

_PICTURES = (".png", ".svg", ".pdf")


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
