"""Files of choices: a JSON file per GPU family, shipped with the package or in the user's cache.

    {"format": 1, "family": "sm90-h200", "entries": [
      {"op": "gather_scores", "version": 1, "size": {...}, "choice": {...}, "measured": {...}}]}

``"choice": null`` means that the rule was the best; it overrides a shipped file's choice.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows, where writers at the same time are not kept apart
    fcntl = None  # type: ignore[assignment]

from hf_kvret_kernels.tuning.tunable import Tunable

_FORMAT = 1
_PACKAGE_FOLDER = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Entry:
    """Tuning result for one operation and size.

    Attributes:
        op: the operation.
        size: of its class ``size``.
        choice: of its class ``kind``; None where the rule was the best.
        measured: the measurements, for people; JSON values.
    """

    op: Tunable[Any]
    size: Any
    choice: Any | None
    measured: Mapping[str, Any] = field(default_factory=dict)


def shipped_file(family: str) -> Path:
    """The package's file for ``family``, which may not exist."""
    return _PACKAGE_FOLDER / f"{family}.json"


def user_file(family: str) -> Path:
    """The user's file for ``family``.

    In the folder of the environment variable HF_KVRET_TUNING, else in ``hf_kvret/tuning`` below
    XDG_CACHE_HOME, else below ``~/.cache``. A relative folder is relative to the working folder.
    """
    folder = os.environ.get("HF_KVRET_TUNING")
    if folder:
        return Path(os.path.expanduser(folder)) / f"{family}.json"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(os.path.expanduser(cache)) / "hf_kvret" / "tuning" / f"{family}.json"


def read_entries(
    path: Path, family: str, operations: Mapping[str, Tunable[Any]]
) -> tuple[list[Entry], list[str]]:
    """The valid entries of a file, and error messages for the others.

    A missing file has no entries and no errors. An invalid file, or one of another format or
    family, has no entries and an error; nothing is raised.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError, RecursionError) as error:
        # Invalid JSON, numbers with too many digits, lists nested too deep.
        return [], [f"it can't be read ({error})"]
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        return [], ["it is no file of choices"]
    if _is_newer(content):
        newer = f"it has format {content['format']}, of a newer version; this one reads {_FORMAT}"
        return [], [f"{newer}, and never writes over it"]
    if content.get("format") != _FORMAT:
        return [], [f"it has format {content.get('format')!r}, this version reads {_FORMAT}"]
    if content.get("family") != family:
        return [], [f"it was made on {content.get('family')!r}, this is {family!r}"]
    entries, wrong = [], []
    for number, item in enumerate(content["entries"]):
        try:
            entries.append(_entry(item, operations))
        except ValueError as error:
            wrong.append(f"entries[{number}]: {error}")
    return entries, wrong


def write_entries(
    path: Path, family: str, entries: Sequence[Entry], operations: Mapping[str, Tunable[Any]]
) -> None:
    """Write ``entries`` to the file; they replace those of the same operation and size.

    Other valid entries stay, invalid ones are dropped. The file is replaced atomically, and
    concurrent writers wait (the lock is an empty file beside it).

    Raises:
        ValueError: a choice outside of what the operation allows, no home to write to, or a file
            of a newer version.
        OSError: the folder can't be written.
    """
    check_replaceable(path)
    for entry in entries:
        if entry.choice is not None:
            entry.op.check(entry.choice)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        check_replaceable(path)
        before, _ = read_entries(path, family, operations)
        table = {(entry.op.name, entry.size): entry for entry in (*before, *entries)}
        content = {
            "format": _FORMAT,
            "family": family,
            "entries": [_as_json(entry) for entry in table.values()],
        }
        _replace(path, json.dumps(content, indent=1) + "\n")


def check_replaceable(path: Path) -> None:
    """ValueError for a path without a home folder, or a file that a newer version wrote."""
    if path.parts[0] == "~":
        raise ValueError(f"{path}: no home folder is known; name a folder in HF_KVRET_TUNING")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        # An unreadable file may be replaced.
        return
    if _is_newer(content):
        raise ValueError(
            f"{path} has format {content['format']}, of a newer version; this one writes "
            f"{_FORMAT}: install that version, name another folder in HF_KVRET_TUNING, or delete "
            "the file"
        )


def _is_newer(content: object) -> bool:
    format_number = content.get("format") if isinstance(content, dict) else None
    return isinstance(format_number, int) and format_number > _FORMAT


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclusive lock for writing ``path``; waits for other writers."""
    with open(path.with_name(f"{path.name}.lock"), "w", encoding="utf-8") as lock:
        if fcntl is not None:
            # Released when the file is closed, also at a crash.
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` atomically, with the permissions of a new file."""
    handle, name = tempfile.mkstemp(".new", f"{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as new:
            new.write(text)
        # Temporary files are private; the lock has the usual permissions.
        os.chmod(name, path.with_name(f"{path.name}.lock").stat().st_mode & 0o777)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _entry(item: object, operations: Mapping[str, Tunable[Any]]) -> Entry:
    if not isinstance(item, dict):
        raise ValueError("it is no object")
    op = operations.get(str(item.get("op")))
    if op is None:
        raise ValueError(f"unknown operation {item.get('op')!r}; known: {', '.join(operations)}")
    if item.get("version") != op.version:
        raise ValueError(
            f"made for version {item.get('version')!r} of {op.name}, this is {op.version}"
        )
    choice = item.get("choice")
    measured = item.get("measured", {})
    if not isinstance(measured, dict):
        raise ValueError(f"measured {measured!r} is no object")
    return Entry(
        op,
        op.size_from(item.get("size")),
        None if choice is None else op.choice_from(choice),
        measured,
    )


def _as_json(entry: Entry) -> dict[str, Any]:
    return {
        "op": entry.op.name,
        "version": entry.op.version,
        "size": entry.size._asdict(),
        "choice": None if entry.choice is None else entry.op.as_json(entry.choice),
        "measured": dict(entry.measured),
    }
