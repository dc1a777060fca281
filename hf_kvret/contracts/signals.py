"""Changes of a cache that a signal does not tear: it waits until they are whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Wait(threading.local):
    """A context that a signal does not end in the middle; contexts in it are part of it.

    Decode steps spare the calls: they count ``depth`` up and down, and look at ``waiting``.

    Attributes:
        depth: contexts that this thread is in; handlers run in the main thread.
        waiting: number of the signal that waits for the end; 0: none.
        last: number of the last signal; 0: none.
    """

    depth = 0
    waiting = 0
    last = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        self.end()

    def end(self) -> None:
        """KeyboardInterrupt at the end of the outermost context, if a signal came in it."""
        if self.waiting and not self.depth:
            number, self.waiting = self.waiting, 0
            raise KeyboardInterrupt(number)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """A handler: raises KeyboardInterrupt, behind the change at hand. The second one: now."""
        self.last = number
        if self.depth and not self.waiting:
            self.waiting = number
        else:
            self.waiting = 0
            raise KeyboardInterrupt(number)


SIGNALS_WAIT = _Wait()


@contextmanager
def interruptible(*numbers: int) -> Iterator[None]:
    """Context in which these signals raise KeyboardInterrupt, but not in the middle of a change.

    A signal that somebody handles or ignores stays with them; so do all in other threads.
    """
    usual = {
        number: signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        for number in numbers
        if threading.current_thread() is threading.main_thread()
    }
    taken = {number: was for number, was in usual.items() if signal.getsignal(number) == was}
    for number in taken:
        signal.signal(number, SIGNALS_WAIT.interrupt)
    try:
        yield
    finally:
        for number, was in taken.items():
            if signal.getsignal(number) == SIGNALS_WAIT.interrupt:
                signal.signal(number, was)
