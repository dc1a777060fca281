"""Where a thread makes the host wait for a CUDA device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch

_MESSAGE = "called a synchronizing CUDA operation"


@contextmanager
def waits() -> Iterator[list[str]]:
    """Collects the host synchronizations of this thread in the body, a ``file:line`` each.

    torch's debug mode and Python's warnings belong to the process: while any thread is in a body,
    what others are told about waits is dropped, and all other warnings go their way.
    """
    found = _watch.begin()
    try:
        yield found
    finally:
        _watch.end()


class _Watch:
    """The debug mode and the way of warnings, changed for as long as any thread collects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, list[list[str]]] = {}
        self._saved: warnings.catch_warnings[None] | None = None
        self._mode = 0
        self._show: Any = None

    def begin(self) -> list[str]:
        """Collect for this thread, too."""
        found: list[str] = []
        with self._lock:
            if self._saved is None:
                self._mode = torch.cuda.get_sync_debug_mode()
                self._saved = warnings.catch_warnings()
                self._saved.__enter__()
                self._show = warnings.showwarning
                warnings.filterwarnings("always", message=_MESSAGE)
                warnings.showwarning = self._note
                torch.cuda.set_sync_debug_mode("warn")
            self._found.setdefault(threading.get_ident(), []).append(found)
        return found

    def end(self) -> None:
        """The newest collection of this thread is over."""
        with self._lock:
            mine = self._found[threading.get_ident()]
            mine.pop()
            if not mine:
                del self._found[threading.get_ident()]
            if not self._found and self._saved is not None:
                torch.cuda.set_sync_debug_mode(self._mode)
                self._saved.__exit__(None, None, None)
                self._saved = None

    def _note(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Called in the thread that warns."""
        if not str(message).startswith(_MESSAGE):
            self._show(message, category, filename, lineno, file, line)
            return
        for found in self._found.get(threading.get_ident(), []):
            found.append(f"{filename}:{lineno}")


_watch = _Watch()
