"""Results that survive an interruption: one JSON file, one entry a finished cell.

Every entry has a checksum, and so has what stands above them, so that a number that was changed by
mistake or by a bad disk is found. That of an entry is also of what stands above, so that it fits no
other file. A cell may be taken out, and is measured again.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from hf_kvret.lab.report.environment import describe_environment
from hf_kvret.saved.folder import replace_file
from hf_kvret.saved.strict_json import plain_bytes, read_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
FAILED = "check_failed"
"""An entry of a row without numbers, which is measured again."""
_RANK = re.compile(r"(.+)\.rank[0-9]+(\.[^.]*)?")
_CHECKSUM = "checksum"
_CHECKSUM_LEN = 16
# A page names these of a run; None stands for a thing that the machine lacks.
_ENVIRONMENT = {"command", "processor", "threads", "accelerator", "python", "versions"}
# Tables and pictures raise these where a number is missing or something else.
_STUMBLES = (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError)
_FIELDS = {"name": str, "setup": dict, "environments": list, "cells": list}

# The name of a cell, for instance {"cache": "paris", "length": 4096, "task": "vt"}.
Cell = dict[str, Any]


class Results:
    """Finished cells of one task, written to ``path`` after each one.

    A file of the same task and set-up is gone on with; its cells are not run again. Processes that
    share the work write ``NAME.rank0.json`` and so on, each its own cells; whoever reads one of
    ``NAME.json`` and these reads all.

    Args:
        name: of the task, as ``eval ruler``.
        setup: everything besides the cells that a number depends on; plain JSON values.
        path: where to keep them; None keeps them in memory only.

    Raises:
        ValueError: the file is no result of ours, or was made with another task or set-up.
    """

    def __init__(self, name: str, setup: dict[str, Any], path: Path | None = None) -> None:
        self.name, self.setup, self.path = name, json.loads(json.dumps(setup)), path
        self._environments: list[dict[str, Any]] = []
        self._results: dict[str, tuple[Cell, dict[str, Any]]] = {}
        # These are in other ranks' files, which this one doesn't write.
        self._others: dict[str, tuple[Cell, dict[str, Any]]] = {}
        self.other_environments: list[dict[str, Any]] = []
        if path is not None:
            for other in files_of(path):
                self._read(other, is_own=other == path)
        environment = describe_environment()
        if environment not in self._environments:
            self._environments.append(environment)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The results of a file and of other ranks, to be looked at; errors as ``read_results``."""
        content = read_results(next(iter(files_of(path)), path))
        results = cls(content["name"], content["setup"])
        results._environments = []
        for file in files_of(path):
            results._read(file, is_own=True)
        return results

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Command, machine and versions of each run that added to the results."""
        others = [one for one in self.other_environments if one not in self._environments]
        return self._environments + others

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a finished cell, else None."""
        entry = self._all().get(_key(cell))
        return None if entry is None else entry[1]

    def add(self, cell: Cell, result: dict[str, Any]) -> None:
        """Keep a finished cell; the file is replaced as a whole, so it is never half written.

        Raises:
            OSError: the file can't be written, because the disk is full for instance; it is as it
                was.
        """
        self._results[_key(cell)] = (dict(cell), result)
        if self.path is not None:
            self.save(self.path)

    def save(self, path: Path) -> None:
        """Replace ``path`` by these results; OSError as of ``add``."""
        replace_file(path, json.dumps(self.to_dict(), indent=1).encode() + b"\n")

    def __iter__(self) -> Iterator[tuple[Cell, dict[str, Any]]]:
        return iter(self._all().values())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, tuple[Cell, dict[str, Any]]]:
        """Own cells and others'; of one that is in both, the one with numbers."""
        cells = dict(self._others)
        for key, entry in self._results.items():
            if key not in cells or FAILED not in entry[1] or FAILED in cells[key][1]:
                cells[key] = entry
        return cells

    def to_dict(self) -> dict[str, Any]:
        """The file's content."""
        content = {
            "name": self.name,
            "format": FORMAT,
            "setup": self.setup,
            "environments": self._environments,
        }
        above = _checksum(content)
        own = self._results.values()
        cells = ({"cell": cell, "result": result} for cell, result in own)
        return {
            **content,
            _CHECKSUM: above,
            "cells": [entry | {_CHECKSUM: _cell_checksum(entry, above)} for entry in cells],
        }

    def _read(self, path: Path, is_own: bool) -> None:
        content = check_results(path, self.name)
        assert content is not None
        changed = [
            f"{key} was {content['setup'].get(key)!r}, now {self.setup.get(key)!r}"
            for key in sorted({*content["setup"], *self.setup})
            if content["setup"].get(key) != self.setup.get(key)
        ]
        if changed:
            raise ValueError(
                f"{path} was made with another set-up ({'; '.join(changed)}): give another --json, "
                "or delete the file"
            )
        environments = self._environments if is_own else self.other_environments
        environments += [one for one in content["environments"] if one not in environments]
        cells = self._results if is_own else self._others
        for entry in content["cells"]:
            known = cells.get(_key(entry["cell"]))
            # Files are read in the order of their ranks, behind the one that all share.
            if known is None or (FAILED in known[1] and FAILED not in entry["result"]):
                cells[_key(entry["cell"])] = (entry["cell"], entry["result"])


def rank_file(path: Path, rank: int) -> Path:
    """``NAME.rank0.json`` of ``NAME.json``, where rank 0 keeps its cells."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def shared_file(path: Path) -> Path:
    """The inverse of ``rank_file``; ``path`` itself where it is no rank's."""
    match = _RANK.fullmatch(path.name)
    return path if match is None else path.with_name(match[1] + (match[2] or ""))


def files_of(path: Path) -> list[Path]:
    """The files that are there of ``path`` and of other ranks with it."""
    shared = shared_file(path)
    beside = path.parent.glob(f"{glob.escape(shared.stem)}.rank*{glob.escape(shared.suffix)}")
    ranks = sorted(one for one in beside if shared_file(one) == shared)
    return [one for one in (shared, *ranks) if one.is_file()]


def read_results(path: Path) -> dict[str, Any]:
    """The content of a result file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one of ours.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        # A measured number may be infinite, or none.
        content = read_json(path.read_bytes(), allow_nan=True)
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}): delete it, or give another file"
        ) from error
    if not isinstance(content, dict) or any(
        not isinstance(content.get(field), kind) for field, kind in _FIELDS.items()
    ):
        raise ValueError(
            f"{path} is no result file of hf-kvret demo, eval, tune or bench: give another file"
        )
    version = content.get("format")
    if version != FORMAT or type(version) is not int:
        raise ValueError(
            f"{path} has format {version!r}, this version reads {FORMAT}: make it again, or "
            "upgrade hf-kvret"
        )
    if not all(map(_is_entry, content["cells"])):
        raise ValueError(
            f"{path} has a cell without a cache or without its result: the file is damaged, delete "
            "it and make it again"
        )
    if not all(map(_is_environment, content["environments"])):
        raise ValueError(
            f"{path} has a damaged entry among its environments: delete it, or make it again"
        )
    _check_checksums(path, content)
    return content


def check_results(path: Path, name: str) -> dict[str, Any] | None:
    """The content of a result file of ``name``; None where there is no file.

    Raises:
        ValueError: it is not one of ours, or of another task.
    """
    if not path.is_file():
        return None
    content = read_results(path)
    if content["name"] != name:
        raise ValueError(
            f"{path} holds results of {content['name']!r}, not of {name!r}: give another --json"
        )
    return content


def why_no_results(path: Path) -> str | None:
    """Why a file is somebody else's; None for one of ours, maybe damaged or of another format.

    Ours have ``format`` and ``cells``; so has the text of one that is no JSON any more.
    """
    if path.is_dir():
        return "a folder"
    if path.exists() and not path.is_file():
        return "no ordinary file"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"it can't be read ({error.strerror or error})"
    try:
        content = read_json(text, allow_nan=True)
    except ValueError:
        return None if '"format"' in text and '"cells"' in text else "not JSON"
    if isinstance(content, dict) and {"format", "cells"} <= content.keys():
        return None
    return "no results of hf-kvret demo, eval, tune or bench"


def _check_checksums(path: Path, content: dict[str, Any]) -> None:
    """ValueError for a result file that is not as it was written, or has a cell twice."""
    above = {name: one for name, one in content.items() if name not in ("cells", _CHECKSUM)}
    if content.get(_CHECKSUM) != _checksum(above):
        raise ValueError(
            f"{path} was changed: name, set-up and environments are not what its checksum says; "
            "restore it, or delete it and make it again"
        )
    keys = set()
    for entry in content["cells"]:
        if entry.get(_CHECKSUM) != _cell_checksum(entry, content[_CHECKSUM]):
            raise ValueError(
                f"{path} was changed: the cell {_in_words(entry['cell'])} is not what its checksum "
                "says, or of another file; restore the file, or take that entry out, and the "
                "command that made it measures it again"
            )
        key = _key(entry["cell"])
        if key in keys:
            raise ValueError(
                f"{path} was changed: the cell {_in_words(entry['cell'])} is there twice; restore "
                "the file, or take both entries out, and the command that made it measures it again"
            )
        keys.add(key)


def _in_words(cell: Cell) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items())


def _cell_checksum(entry: dict[str, Any], above: str) -> str:
    """The checksum of an entry, in a file with the checksum ``above``."""
    return _checksum([above, {name: one for name, one in entry.items() if name != _CHECKSUM}])


def _checksum(value: Any) -> str:
    """The checksum of what a reader will have: JSON knows no tuples, and no numbers as names."""
    content = json.loads(json.dumps(value))
    return hashlib.sha256(plain_bytes(content)).hexdigest()[:_CHECKSUM_LEN]


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("cell"), dict)
        and isinstance(entry["cell"].get("cache"), str)
        and isinstance(entry.get("result"), dict)
    )


def _is_environment(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() >= _ENVIRONMENT
        and isinstance(entry["versions"], dict)
    )


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


@contextmanager
def naming_damage(measurement: Any, results: Results, path: Path | None) -> Iterator[None]:
    """Inside, a table or picture of ``results``, which ``path`` holds, is made.

    ``path`` None is for results that were never in a file: their errors are our own.

    Raises:
        ValueError: a cell lacks something, or has it of another type; the file is named, and the
            cell where a table of it alone can't be made either.
    """
    try:
        yield
    except _STUMBLES as error:
        if path is None:
            raise
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        cell = _damaged_cell(measurement, results)
        name = "" if cell is None else f", {' '.join(map(str, cell.values()))}"
        raise ValueError(
            f"{path} has a damaged cell{name} ({what}): delete it, or make it again"
        ) from error


def _damaged_cell(measurement: Any, results: Results) -> Cell | None:
    for cell, result in results:
        alone = Results(results.name, results.setup)
        alone.add(cell, result)
        try:
            measurement.table(alone)
        except _STUMBLES:
            return cell
    return None


@contextmanager
def sole_writer(path: Path | None) -> Iterator[None]:
    """Keep other processes from writing results to ``path``; None is no file.

    A file ``.NAME.lock`` beside it is locked as long as the context is open. The system lets go of
    it when the process ends, however that happens. Without such locks (Windows) nothing is kept.

    Raises:
        ValueError: another process writes there.
    """
    if path is None or fcntl is None:
        yield
        return
    lock = path.parent / f".{path.name}.lock"
    descriptor = _take_lock(lock, path)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _take_lock(lock: Path, path: Path) -> int:
    """A descriptor of the file ``lock``, which stands in its place and is locked."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(
                f"another process writes its results to {path}, and each would drop what the other "
                "finished: give another --json, or wait until it has ended"
            ) from None
        # The process that held it may have removed the file between our opening and locking it.
        if lock.exists() and lock.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
        os.close(descriptor)
