"""Results that survive an interruption: one JSON file, one entry a finished cell.

Where they are written is tried before the work; each run that adds some says where it ran.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch

from hf_kvret.saved.folder import read_object, replace_file
from hf_kvret.version import __version__

FORMAT = 1
FAILED = "check_failed"
"""An entry of a row without numbers, which is measured again."""
# One of these says why another row has none.
_REASONS = ("out_of_memory", "failed", "skipped")
_PICTURES = (".png", ".svg", ".pdf")

# The name of a cell, for instance {"cache": "paris", "length": 4096, "task": "vt"}.
Cell = dict[str, Any]


class Results:
    """Finished cells of one task, written to ``path`` after each one.

    A file of the same task and set-up is gone on with; its cells are not run again.

    Args:
        name: of the task, as ``eval ruler``.
        setup: everything besides the cells that a number depends on; plain JSON values.
        path: where to keep them; None keeps them in memory only.

    Attributes:
        environments: command, machine and versions of each run that added to the results.

    Raises:
        ValueError: the file is no result of ours, or was made with another task or set-up.
    """

    def __init__(self, name: str, setup: dict[str, Any], path: Path | None = None) -> None:
        self.name, self.setup, self.path = name, plain(setup), path
        self.environments: list[dict[str, Any]] = []
        self._results: dict[str, tuple[Cell, dict[str, Any]]] = {}
        # The file as it was read or written last.
        self._content = None if path is None else _bytes_of(path)
        if path is not None and path.is_file():
            self._take(read_results(path, name))
        environment = describe_environment()
        if environment not in self.environments:
            self.environments.append(environment)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The results of a file, to be looked at; errors as ``read_results``."""
        content = read_results(path)
        results = cls(content["name"], content["setup"])
        results.environments.clear()
        results._take(content)
        return results

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a finished cell, as ``plain``; None without one."""
        entry = self._results.get(_key(cell))
        return None if entry is None else entry[1]

    def add(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep a finished cell; the file is replaced as a whole, so it is never half written.

        Raises:
            OSError: the file can't be written, because the disk is full for instance; it is as it
                was.
            ValueError: another process has written the file meanwhile; it is as it was.
        """
        self._results[_key(cell)] = (dict(cell), plain(result))
        if self.path is None:
            return
        if _bytes_of(self.path) not in (None, self._content):
            raise ValueError(
                f"another process writes its results to {self.path}, and this one would drop "
                "them: give another --json, or call this again when that has ended"
            )
        content = {
            "name": self.name,
            "format": FORMAT,
            "setup": self.setup,
            "environments": self.environments,
            "cells": [{"cell": cell, "result": row} for cell, row in self],
        }
        self._content = json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"
        replace_file(self.path, self._content)

    def __iter__(self) -> Iterator[tuple[Cell, dict[str, Any]]]:
        return iter(self._results.values())

    def __len__(self) -> int:
        return len(self._results)

    def _take(self, content: dict[str, Any]) -> None:
        """Go on from the content of a file."""
        changed = [
            f"{key} was {content['setup'].get(key)!r}, now {self.setup.get(key)!r}"
            for key in sorted({*content["setup"], *self.setup})
            if content["setup"].get(key) != self.setup.get(key)
        ]
        if changed:
            raise ValueError(
                f"{self.path} was made with another set-up ({'; '.join(changed)}): give another "
                "--json, or delete the file"
            )
        self.environments += content["environments"]
        for entry in content["cells"]:
            self._results[_key(entry["cell"])] = (entry["cell"], entry["result"])


def read_results(path: Path, name: str | None = None) -> dict[str, Any]:
    """The content of a result file, of the task ``name`` where it is given.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one of ours, or of another version or task.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    content, fault = read_object(path, "cells")
    content = plain(content)
    if content.get("format") == FORMAT and not _is_whole(content):
        content, fault = {}, "a part of it is missing, or of another kind"
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no result file that this version of hf-kvret reads "
            f"({fault or 'another format'}): give another file"
        )
    if name not in (None, content["name"]):
        raise ValueError(
            f"{path} holds results of {content['name']!r}, not of {name!r}: give another --json"
        )
    return content


def _is_whole(content: dict[str, Any]) -> bool:
    """Whether all parts of a result file are there; no name of a cell and no result is empty."""
    kinds = {"name": str, "setup": dict, "environments": list, "cells": list}
    return all(isinstance(content.get(name), kind) for name, kind in kinds.items()) and all(
        isinstance(one, dict)
        and all(isinstance(one.get(part), dict) and one[part] for part in ("cell", "result"))
        for one in content["cells"]
    )


def plain(value: Any) -> Any:
    """``value`` as JSON gives it back, which has null for a number that is NaN or infinite."""
    return json.loads(json.dumps(value), parse_constant=lambda word: None)


def why_missing(row: dict[str, Any]) -> str | None:
    """Why a row has no numbers, None where it has: memory ran out, or the check failed."""
    if FAILED in row:
        return f"check failed: {row[FAILED]}"
    return next((str(row[name]) for name in _REASONS if name in row), None)


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


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


def describe_environment() -> dict[str, Any]:
    """Command, machine and versions, for the JSON beside every table."""
    # An absolute path gives way to its name: results are shared, and folders are not.
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return {
        "command": shlex.join([*program().split(), *words]),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {
            "hf-kvret": __version__,
            **{name: _version(name) for name in ("torch", "transformers", "triton")},
        },
    }


def program() -> str:
    """The program that runs: ``hf-kvret``, or ``python`` and a script's path."""
    path = Path(sys.argv[0])
    if path.parent.parent.name == "examples":
        return f"python examples/{path.parent.name}/{path.name}"
    return "hf-kvret" if path.name == "cli.py" else path.name


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
