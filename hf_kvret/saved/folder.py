"""Files of a folder, replaced so that a crash, a full disk or a kill leaves the old or the new.

Data files have versioned names, as ``cache-3f9a0c41d2e7.safetensors``; one JSON file of a fixed
name, the *naming* file, says which of them count. A save writes new data files, syncs them, and
replaces the naming file in one step; only then are older files removed::

    with replacing(folder, "cache.json", "cache") as save:
        name = save.keep(content, version, ".safetensors")
        save.commit(json.dumps({"files": {"tensors": name}}).encode())

No file is written through a symbolic link (a folder that is one is followed), and nothing is
removed but files of our own names.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

VERSION_LEN = 12
"""Hexadecimal digits of a version in the name of a data file."""

_UNFINISHED = ".unfinished"
_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_RIGHTS = {errno.EACCES, errno.EPERM, errno.EROFS}


class Replacement:
    """New files of a folder, not in place before ``commit``. Made by ``replacing``.

    Attributes:
        directory: the folder.
        naming: path of the naming file.
    """

    def __init__(self, directory: Path, naming: str, stem: str) -> None:
        self.directory, self.naming, self._stem = directory, directory / naming, stem
        # A save that fails removes these, but for those that the naming file names.
        self._written: set[Path] = set()
        self._named: set[str] = set()
        self._suffixes: set[str] = set()
        self._beside: dict[str, Path] = {}
        self._content: bytes | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether the naming file was replaced, so that the new files count."""
        is_committed = self._content is not None and self.naming.is_file()
        return is_committed and self.naming.read_bytes() == self._content

    def new_folder(self) -> Path:
        """A new, empty folder for files that other libraries write; gone after the save."""
        path = self._unfinished_path()
        path.mkdir()
        return path

    def keep(self, content: bytes | Path, version: str, suffix: str) -> str:
        """Make a data file; returns its name, for the naming file.

        Args:
            content: of the file, or a file in ``new_folder``, which is moved.
            version: ``VERSION_LEN`` hexadecimal digits, which no file of other content has.
            suffix: of the name, ``".safetensors"`` for instance.
        """
        if isinstance(content, Path):
            path = content
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        else:
            path = self._write(content)
        name = f"{self._stem}-{version}{suffix}"
        target = self.directory / name
        check_replaceable(target)
        if not target.exists():
            self._written.add(target)
        os.replace(path, target)
        self._named.add(name)
        self._suffixes.add(suffix)
        return name

    def put_beside(self, name: str, content: bytes) -> None:
        """Have ``commit`` replace a file of a fixed name that nothing depends on, as a card."""
        check_replaceable(self.directory / name)
        self._beside[name] = self._write(content)

    def commit(self, content: bytes) -> None:
        """Replace the naming file with ``content``, which counts from here on; remove older files.

        They stay where the new names can't be brought to the disk: a power cut may bring the older
        naming file back, and the next save removes them.
        """
        path = self._write(content)
        if self._named:
            # They are there before the file that names them, also after a power cut.
            _sync_folder(self.directory)
        self._content = content
        os.replace(path, self.naming)
        for name, path in self._beside.items():
            os.replace(path, self.directory / name)
        _sync_folder(self.directory)
        self._remove_older()

    def abandon(self) -> None:
        """Remove what was written and is not named."""
        named = self._named if self.is_in_place else set()
        for path in self._written:
            if path.name not in named:
                _remove(path)

    def _unfinished_path(self) -> Path:
        """A new name in the folder, removed where the save fails."""
        name = f".{self._stem}-{secrets.token_hex(8)}{_UNFINISHED}"
        path = self.directory / name
        self._written.add(path)
        return path

    def _write(self, content: bytes) -> Path:
        """Bring ``content`` to the disk, in a file whose name says that it is unfinished."""
        path = self._unfinished_path()
        # A new file, never through a link; the usual rights, which the umask cuts.
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return path

    def _remove_older(self) -> None:
        versioned = re.compile(rf"{re.escape(self._stem)}-[0-9a-f]{{{VERSION_LEN}}}(\..+)")
        unfinished = re.compile(rf"\.{re.escape(self._stem)}-[0-9a-f]{{16}}{_UNFINISHED}")
        for path in list(self.directory.iterdir()):
            match = versioned.fullmatch(path.name)
            # One with another suffix is not ours: cache-202411250228.zip, of a date.
            is_ours = match is not None and match[1] in self._suffixes
            if path.name not in self._named and (is_ours or unfinished.fullmatch(path.name)):
                _remove(path)


@contextmanager
def replacing(directory: Path, naming: str, stem: str) -> Iterator[Replacement]:
    """A ``Replacement`` of files in ``directory``, which is made if needed.

    Whatever breaks off before the naming file is replaced leaves what was there before. One save
    at a time: another process's, or thread's, is waited for.

    Args:
        directory: where to.
        naming: name of the naming file.
        stem: what names of data files begin with.

    Raises:
        OSError: as the system says, a full disk for instance, with what to do about it.
        ValueError: what would be replaced is a symbolic link, or no file.
    """
    new = Replacement(directory, naming, stem)
    try:
        _make_folder(directory)
        with _locked(directory):
            check_replaceable(new.naming)
            try:
                yield new
            except BaseException:
                new.abandon()
                raise
    except OSError as error:
        if error.errno is None:
            # It is the caller's own, and says what to do.
            raise
        # OSError(number, ...) is of the class for that number, as FileExistsError.
        raise OSError(error.errno, _explanation(error, new)) from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace one file, whose folder is made if needed: it has the old or the new content.

    Raises:
        OSError, ValueError: as ``replacing``.
    """
    with replacing(path.parent, path.name, path.name) as new:
        new.commit(content)


def check_replaceable(path: Path) -> None:
    """ValueError for a symbolic link, or anything else that is no file; nothing there is fine."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise ValueError(
            f"{path} is a symbolic link, and is not written through: remove it, or give the folder "
            "that it leads to"
        )
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is no ordinary file, and is not replaced: give another folder")


def _make_folder(directory: Path) -> None:
    """Make ``directory`` and the folders above it, where they are missing, and sync them."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        _sync_folder(path.parent)


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


def _remove(path: Path) -> None:
    """Remove a file, or an unfinished folder. What can't be removed waits for the next save."""
    with suppress(OSError):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            path.unlink()
        elif stat.S_ISDIR(mode) and path.name.endswith(_UNFINISHED):
            shutil.rmtree(path)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Wait until nobody else replaces files of ``directory``, where the system has such locks."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # Without locks, as on some network file systems, two saves at once are the user's care.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            # A forked process may have the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _explanation(error: OSError, new: Replacement) -> str:
    """What is left of the old files after an error of the system, and what to do."""
    if error.errno in _SPACE:
        remedy = "free space on this disk (or raise the limit on file sizes)"
    elif error.errno in _RIGHTS:
        remedy = "make the folder writable"
    else:
        remedy = "look after the disk"
    why = error.strerror or error
    if new.is_in_place:
        return (
            f"{new.naming} was written, and the new content is in place, but may not survive a "
            f"power cut ({why}): {remedy}, and save again"
        )
    return (
        f"{new.naming} could not be written ({why}), what was there before is as it was: {remedy}, "
        "or give another place"
    )
