"""One process at a time writes a file of results: each would drop what the others finished."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


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
    descriptor = _take(lock, path)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _take(lock: Path, path: Path) -> int:
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
