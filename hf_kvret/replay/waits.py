"""Where a thread makes the host wait for a CUDA device."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch

_MESSAGE = "called a synchronizing CUDA operation"
_FILTER = ("always", re.compile(_MESSAGE), Warning, None, 0)


@contextmanager
def waits() -> Iterator[list[str]]:
    """Collects the host synchronizations of this thread in the body, a ``file:line`` each.

    torch's debug mode and Python's warnings belong to the process: while any thread is in a body,
    what others are told about waits is dropped. A thread that changes the filters of warnings
    meanwhile may hide waits.
    """
    places = _watch.begin()
    try:
        yield places
    finally:
        _watch.end()


class _Watch:
    """The debug mode and the way of warnings, changed for as long as any thread collects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[int, list[list[str]]] = {}
        self._mode = 0
        # Where warnings go on to. Never this object: ``catch_warnings`` of another thread may put
        # it back after the end, where the next beginning then comes upon it.
        self._show: Any = None

    def begin(self) -> list[str]:
        """Collect for this thread, too."""
        places: list[str] = []
        with self._lock:
            if not self._places:
                mode = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("warn")
                self._mode = mode
                if warnings.showwarning != self._note:
                    self._show, warnings.showwarning = warnings.showwarning, self._note
            # First again, whatever others have put there.
            _remove_filter()
            warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]
            _filters_changed()
            self._places.setdefault(threading.get_ident(), []).append(places)
        return places

    def end(self) -> None:
        """The newest collection of this thread is over."""
        with self._lock:
            own = self._places[threading.get_ident()]
            own.pop()
            if not own:
                del self._places[threading.get_ident()]
            if not self._places:
                _remove_filter()
                if warnings.showwarning == self._note:
                    warnings.showwarning = self._show
                torch.cuda.set_sync_debug_mode(self._mode)

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
        if not self._places or not str(message).startswith(_MESSAGE):
            self._show(message, category, filename, lineno, file, line)
            return
        for places in self._places.get(threading.get_ident(), []):
            places.append(f"{filename}:{lineno}")


def _remove_filter() -> None:
    if _FILTER in warnings.filters:
        warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]
        _filters_changed()


def _filters_changed() -> None:
    """Python looks at filters anew for lines that have warned before; not every version has it."""
    getattr(warnings, "_filters_mutated", lambda: None)()


_watch = _Watch()
