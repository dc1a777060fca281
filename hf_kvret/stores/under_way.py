"""Copies from a device to the host that have not ended, and a bound on what they hold."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch

# Two layers of a prompt of 128K tokens, at 8 KV heads of 128 in 16 bits.
_MOST_BYTES = 1 << 30

_copies: dict[torch.device, CopiesUnderWay] = {}


class Ended(Protocol):
    """What is asked of a CUDA event."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Wait until it has."""


class CopiesUnderWay:
    """What is being copied from one device, oldest first.

    The rows of a copy stay in device memory until it ends. The host launches layers far ahead of
    the device, and rows of every layer that it launched would be held at once; so it waits for the
    oldest copies when more than ``most_bytes`` are under way. The device doesn't wait: it has the
    work of the layers in between.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._waiting: deque[tuple[Ended, int]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are not known to have ended."""
        return sum(size for _, size in self._waiting)

    def add(self, ended: Ended, size: int) -> None:
        """Note a copy of ``size`` bytes; waits until all but ``most_bytes`` have been copied.

        The newest copy is never waited for, however large it is.
        """
        self._waiting.append((ended, size))
        while self._waiting[0][0].query() and len(self._waiting) > 1:
            self._waiting.popleft()
        while self.nbytes > self.most_bytes and len(self._waiting) > 1:
            self._waiting.popleft()[0].synchronize()


def copies_from(device: torch.device) -> CopiesUnderWay:
    """Those of ``device``: of all stores and caches of the process."""
    return _copies.setdefault(device, CopiesUnderWay())
