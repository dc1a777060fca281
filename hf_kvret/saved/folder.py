"""Files of a folder, replaced so that a crash, a full disk or a kill leaves the old or the new.

Data files have versioned names, as ``cache-3f9a0c41d2e7.safetensors``; one JSON file of a fixed
name, the *naming* file, says which of them count. A save writes new data files, syncs them, and
replaces the naming file in one step; only then are older files removed::

    with replacing(folder, "cache.json", "cache") as save:
        name = save.keep(content, version)
        save.commit(json.dumps({"files": {"tensors": name}}).encode())

Files get their names by renaming, so none is written through a symbolic link. Nothing is removed
but files of our own names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

VERSION_LEN = 12
"""Hexadecimal digits of a version in the name of a data file."""

SUFFIX = ".safetensors"
"""End of the name of a data file."""

_UNFINISHED = ".unfinished"


class Replacement:
    """New files of a folder, not in place before ``commit``. Made by ``replacing``.

    Attributes:
        directory: the folder.
        naming: path of the naming file.
    """

    def __init__(self, directory: Path, naming: str, stem: str) -> None:
        self.directory, self.naming, self._stem = directory, directory / naming, stem
        self._named: set[str] = set()
        self._beside: dict[str, Path] = {}
        # A save that fails before it counts removes these.
        self._written: set[Path] = set()
        self._counts = False

    def unfinished(self) -> Path:
        """The path of a new file in the folder, for ``keep``."""
        path = self.directory / f".{self._stem}-{secrets.token_hex(8)}{_UNFINISHED}"
        self._written.add(path)
        return path

    def keep(self, content: bytes | Path, version: str) -> str:
        """Make a data file; returns its name, for the naming file.

        Args:
            content: of the file, or an ``unfinished`` file, which is moved.
            version: ``VERSION_LEN`` hexadecimal digits, which no file of other content has.
        """
        if isinstance(content, Path):
            path = content
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        else:
            path = self._write(content)
        target = self.directory / f"{self._stem}-{version}{SUFFIX}"
        # The same content has the same file as before, which stays where this save fails.
        if not target.exists():
            self._written.add(target)
        os.replace(path, target)
        self._named.add(target.name)
        return target.name

    def put_beside(self, name: str, content: bytes) -> None:
        """Have ``commit`` replace a file of a fixed name that nothing depends on, as a card."""
        self._beside[name] = self._write(content)

    def commit(self, content: bytes) -> None:
        """Replace the naming file with ``content``, which counts from here on; remove older files.

        Older files stay where the new names can't be brought to the disk: a power cut may bring
        the older naming file back, and the next save removes them.
        """
        path = self._write(content)
        # Data files are there before the file that names them, also after a power cut.
        _sync_folder(self.directory)
        self._counts = True
        os.replace(path, self.naming)
        for name, beside in self._beside.items():
            os.replace(beside, self.directory / name)
        _sync_folder(self.directory)
        self._remove_older()

    def abandon(self) -> None:
        """Remove what was written, where it does not count yet."""
        for path in () if self._counts else self._written:
            path.unlink(missing_ok=True)

    def explained(self, error: OSError) -> OSError:
        """An error of the system with what is left of the old files, and what to do."""
        # Errors behind the naming file say enough.
        return error if self._counts else _explained(error, self.naming)

    def _write(self, content: bytes) -> Path:
        """Bring ``content`` to the disk, in a file whose name says that it is unfinished."""
        path = self.unfinished()
        _write_synced(path, content)
        return path

    def _remove_older(self) -> None:
        stem, digits = re.escape(self._stem), f"[0-9a-f]{{{VERSION_LEN}}}"
        ours = re.compile(
            rf"{stem}-{digits}{re.escape(SUFFIX)}|\.{stem}-[0-9a-f]{{16}}{_UNFINISHED}"
        )
        for path in list(self.directory.iterdir()):
            if path.name not in self._named and ours.fullmatch(path.name):
                # A file that can't be removed waits for the next save.
                with suppress(OSError):
                    path.unlink()


def _explained(error: OSError, file: str | Path) -> OSError:
    """An error of the system, while ``file`` was written, with what to do."""
    # Python's own errors say enough.
    if error.errno is None:
        return error
    # OSError(number, ...) is of the class for that number, as FileExistsError.
    return OSError(
        error.errno,
        f"{file} could not be written ({error.strerror}), what was there before is as it was: free "
        "space on this disk, make the folder writable, or give another place",
    )


@contextmanager
def replacing(directory: Path, naming: str, stem: str) -> Iterator[Replacement]:
    """A ``Replacement`` of files in ``directory``, which is made if needed.

    Whatever breaks off before the naming file is replaced leaves what was there before. One save
    at a time: another process's, or thread's, is waited for, by the file ``.<naming>.lock``.

    Args:
        directory: where to.
        naming: name of the naming file.
        stem: what names of data files begin with.

    Raises:
        OSError: as the system says, a full disk for instance, with what to do about it.
    """
    new = Replacement(directory, naming, stem)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / f".{naming}.lock"):
            try:
                yield new
            except BaseException:
                new.abandon()
                raise
    except OSError as error:
        explained = new.explained(error)
        if explained is error:
            raise
        raise explained from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace one file, whose folder is made if needed: it has the old or the new content.

    OSError as the system says, with what to do about it.
    """
    new = path.with_name(f".{path.name}-{secrets.token_hex(8)}{_UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_synced(new, content)
        os.replace(new, path)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        # It is gone already, or its folder could not be made.
        with suppress(OSError):
            new.unlink()
    _sync_folder(path.parent)


def _write_synced(path: Path, content: bytes) -> None:
    # A new file has the usual rights, which the umask cuts.
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(directory: Path) -> None:
    """Bring names of files in ``directory`` to the disk, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems have no such thing.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def read_object(path: Path, key: str) -> tuple[dict[str, Any], str]:
    """The object in a JSON file that has ``key``, and ""; of other content {}, and what it is."""
    try:
        content = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        return {}, f"no JSON: {error}"
    if isinstance(content, dict) and key in content:
        return content, ""
    return {}, f"no JSON object with a {key}"


def plain_bytes(value: Any) -> bytes:
    """``value`` as JSON with sorted names, without spaces, in ASCII.

    The same before it is written to a file and after it is read.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest_of_json(values: Mapping[str, Any], but: str) -> str:
    """SHA-256 of ``values`` without the one named ``but``, however a file lays them out."""
    return hashlib.sha256(
        plain_bytes({name: value for name, value in values.items() if name != but})
    ).hexdigest()
