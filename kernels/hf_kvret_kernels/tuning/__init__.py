"""Launch numbers of Triton kernels: rules, and what was measured to be better on a GPU family.

An operation says in its ``triton.py`` what there is to choose (``Tunable``) and what it takes
where nothing was measured, the rule. ``choice`` looks up what
``examples/benchmarks/bench_launch.py`` found. That is a look-up in a dictionary: it times nothing,
waits for nothing, and reads files once for a device, so it may stand in a step that is captured as
a CUDA graph.

A choice changes how the work is cut up, never the result beyond rounding.

A file of choices is shipped with the package for a GPU family, or lies in the user's cache:

    {"format": 1, "family": "sm90-h200", "entries": [
      {"op": "gather_scores", "version": 1, "size": {...}, "choice": {...}, "measured": {...}}]}

``"choice": null`` means that the rule was the best; it overrides a shipped file's choice.

For an operation of yours, put a ``Tunable`` called ``CHOICES`` into its ``triton.py``, add its
folder to ``_OPERATIONS``, call ``choice(CHOICES, size, rule, device)`` at the launch, and add a
case to ``bench_launch.py``. Raise ``version`` when the kernel changes so much that old measurements
mean nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

try:
    import fcntl
except ImportError:  # not on Windows, where writers at the same time are not kept apart
    fcntl = None  # type: ignore[assignment]

C = TypeVar("C")
_FORMAT = 1
_PACKAGE_FOLDER = Path(__file__).parent / "shipped"
INTERPRETER = "interpreter"
_VENDOR = {"nvidia", "amd", "geforce", "tesla", "quadro", "instinct", "gpu"}
_MEMORY = re.compile(r"\d+gb|hbm\d\w*")
# Their modules ``triton`` have a Tunable called CHOICES. By name, because they import this one.
_OPERATIONS = ("gather_attention", "gather_scores", "prompt_attention")

_tables: dict[torch.device, dict[tuple[str, Any], Any]] = {}
_tables_lock = threading.Lock()


@dataclass(frozen=True)
class Tunable(Generic[C]):
    """The launch numbers of an operation.

    Attributes:
        name: of the operation.
        version: incremented when a kernel change makes old measurements invalid.
        size: NamedTuple of strings, integers and booleans; equal ones share a choice. Lengths in it
            are rounded by ``power_of_two``.
        kind: frozen dataclass of launch numbers, integers and strings.
        space: the values that each field of ``kind`` may take, the outer ones of a search first.
        only: ``field: (other, value)`` for fields that count only where ``other`` is ``value``.

    Raises:
        ValueError: ``space`` does not name exactly the fields of ``kind``.
    """

    name: str
    version: int
    size: type[Any]
    kind: type[C]
    space: Mapping[str, tuple[int | str, ...]]
    only: Mapping[str, tuple[str, int | str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {one.name for one in fields(self.kind)}  # type: ignore[arg-type]
        if set(self.space) != names:
            raise ValueError(
                f"space of {self.name} names {sorted(self.space)}: it must name the fields of "
                f"{self.kind.__name__}, {sorted(names)}"
            )

    def counts(self, name: str, choice: C) -> bool:
        """Whether the field ``name`` has an effect, given the other fields of ``choice``."""
        other, value = self.only.get(name, (name, getattr(choice, name)))
        return bool(getattr(choice, other) == value)

    def check(self, choice: C) -> None:
        """ValueError for a choice that is outside of ``space``."""
        for name, values in self.space.items():
            value = getattr(choice, name)
            # True equals 1, but is not a launch number.
            if type(value) not in {type(one) for one in values} or value not in values:
                raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, values))}")

    def choice_from(self, item: object) -> C:
        """The choice from a file's JSON object; ValueError if it is invalid."""
        self._check_names(item, set(self.space), "choice")
        choice = self.kind(**item)  # type: ignore[arg-type]
        self.check(choice)
        return choice

    def size_from(self, item: object) -> Any:
        """The size class from a file's JSON object; ValueError if it is invalid."""
        self._check_names(item, set(self.size._fields), "size")
        assert isinstance(item, dict)
        if not all(isinstance(value, str | int) for value in item.values()):
            raise ValueError(f"size {item}: its values must be strings, integers or booleans")
        return self.size(**item)

    def as_json(self, choice: C) -> dict[str, Any]:
        """The JSON object that ``choice_from`` reads."""
        return asdict(choice)  # type: ignore[call-overload]

    def _check_names(self, item: object, names: set[str], what: str) -> None:
        if not isinstance(item, dict) or set(item) != names:
            raise ValueError(f"{what} {item!r}: pass an object with {', '.join(sorted(names))}")


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """As ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def power_of_two(count: int) -> int:
    """The least power of two that is not below ``count``; 0 for 0.

    Raises:
        ValueError: a negative count.
    """
    if count < 0:
        raise ValueError(f"count={count}: at least 0")
    return 1 << (count - 1).bit_length() if count else 0


def gpu_family(device: torch.device) -> str:
    """For example ``"sm90-h200"``: compute capability, and the name without vendor and memory size.

    ``"interpreter"`` for other devices than GPUs: Triton kernels run interpreted there, and have
    choices only for tests. Does not synchronize with the device.
    """
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return family_of(torch.cuda.get_device_name(device), major, minor)


def family_of(name: str, major: int, minor: int) -> str:
    """The family of a GPU called ``name`` with compute capability ``major.minor``."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    parts = [word for word in words if word not in _VENDOR and not _MEMORY.fullmatch(word)]
    return "-".join([f"sm{major}{minor}", *parts])


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


def choice(op: Tunable[C], size: Any, default: C, device: torch.device) -> C:
    """The tuned choice for ``op`` at ``size`` on the family of ``device``, else ``default``.

    The user's file overrides the package's. Both are read at the first call for a device; invalid
    entries are ignored, with one warning per file.
    """
    table = _tables.get(device)
    if table is None:
        table = _load(device)
    result: C | None = table.get((op.name, size)) if table else None
    return default if result is None else result


def operations() -> dict[str, Tunable[Any]]:
    """All tunable operations, by name."""
    modules = [importlib.import_module(f"..{name}.triton", __name__) for name in _OPERATIONS]
    return {module.CHOICES.name: module.CHOICES for module in modules}


def reload() -> None:
    """Make the next call of ``choice`` read the files again."""
    with _tables_lock:
        _tables.clear()


def _load(device: torch.device) -> dict[tuple[str, Any], Any]:
    with _tables_lock:
        if device in _tables:
            return _tables[device]
        family, known_operations = gpu_family(device), operations()
        table: dict[tuple[str, Any], Any] = {}
        for path in (shipped_file(family), user_file(family)):
            entries, wrong = read_entries(path, family, known_operations)
            if wrong:
                more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                warnings.warn(
                    f"{path}: {wrong[0]}{more}. Kernels run as their rules say where it can't be "
                    "used; delete the file, or run `python examples/benchmarks/bench_launch.py "
                    "--device cuda` in a checkout, which writes it anew",
                    stacklevel=4,
                )
            table |= {(entry.op.name, entry.size): entry.choice for entry in entries}
        # null entries have overridden shipped ones and are no longer needed.
        _tables[device] = {key: value for key, value in table.items() if value is not None}
        return _tables[device]
