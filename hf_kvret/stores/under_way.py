"""Pending copies from a device to the host, and a bound on the memory that they keep alive."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

import torch

# Two layers of a prompt of 128K tokens, at 8 KV heads of 128 in 16 bits.
_MOST_BYTES = 1 << 30

_copies: dict[torch.device, CopiesUnderWay] = {}


class CopyEvent(Protocol):
    """The part of a CUDA event that is used."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Wait until it has."""


class CopiesUnderWay:
    """Pending copies from one device, oldest first.

    The rows of a copy stay in device memory until it ends. The host launches layers far ahead of
    the device, so the rows of all launched layers would be in memory at once. Therefore the host
    waits for the oldest copies when more than ``most_bytes`` are pending. The device does not idle:
    it has the work of the layers in between. Threads share it; a waiting one does not block others.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._queue: deque[tuple[CopyEvent, int]] = deque()
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are not known to have ended."""
        return self._nbytes

    def add(self, event: CopyEvent, size: int) -> None:
        """Note a copy of ``size`` bytes; waits until all but ``most_bytes`` have been copied.

        The newest copy is never waited for, however large it is.
        """
        with self._lock:
            self._queue.append((event, size))
            self._nbytes += size
            while len(self._queue) > 1 and self._queue[0][0].query():
                self._forget_oldest()
        while (oldest := self._too_much()) is not None:
            oldest.synchronize()
            with self._lock:
                # Another thread may have waited for the same copy.
                if self._queue[0][0] is oldest:
                    self._forget_oldest()

    def _too_much(self) -> CopyEvent | None:
        """The copy to wait for; None where no more than the bound is under way."""
        with self._lock:
            over = self._nbytes > self.most_bytes and len(self._queue) > 1
            return self._queue[0][0] if over else None

    def _forget_oldest(self) -> None:
        self._nbytes -= self._queue.popleft()[1]


def copies_from(device: torch.device) -> CopiesUnderWay:
    """The pending copies from ``device``, of all stores and caches of the process."""
    return _copies.setdefault(device, CopiesUnderWay())
