"""Rows that grow in big steps: the preallocated memory of an index."""

from __future__ import annotations

from typing import Self

import torch


class GrowingRows:
    """``[B, H, n, *width]`` rows with room for more behind them, shared between forks.

    Capacity grows by a sixteenth of the length, at least ``least_step`` rows. A fork shares the
    buffer until it appends; then it takes a copy of its own. The original goes on in place,
    unless it was cropped below what a fork still reads.
    """

    def __init__(self, least_step: int = 256) -> None:
        self.least_step = least_step
        self.length = 0
        self._buffer: torch.Tensor | None = None
        self._owned = True
        self._promised = 0

    @property
    def rows(self) -> torch.Tensor:
        """View ``[B, H, n, *width]`` of the rows that are in use."""
        if self._buffer is None:
            raise RuntimeError("no rows yet: append first")
        return self._buffer[:, :, : self.length]

    def reserve(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Make room for ``count`` more rows and return the view ``[B, H, count, *width]`` of it.

        ``like`` is any tensor ``[B, H, *, *width]`` with the dtype, device and shape of rows.
        """
        needed, buffer = self.length + count, self._buffer
        writable = self._owned and self.length >= self._promised
        if buffer is None or not writable or needed > buffer.shape[2]:
            # A multiple of 16, so that every head's rows begin where wide loads may.
            capacity = -(-(needed + max(self.least_step, needed // 16)) // 16) * 16
            grown = like.new_empty(*like.shape[:2], capacity, *like.shape[3:])
            if buffer is not None:
                grown[:, :, : self.length] = self.rows
            self._adopt(grown)
            buffer = grown
        view = buffer[:, :, self.length : needed]
        self.length = needed
        return view

    def append(self, rows: torch.Tensor) -> None:
        """Copy ``rows [B, H, count, *width]`` behind the others."""
        self.reserve(rows.shape[2], rows).copy_(rows)

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        if self._buffer is not None:
            self._adopt(self._buffer.index_select(0, rows))

    def crop(self, length: int) -> None:
        """Keep the first ``length`` rows."""
        self.length = min(self.length, length)

    def fork(self) -> Self:
        """A copy that shares the buffer until it appends."""
        twin = type(self)(self.least_step)
        twin.length, twin._buffer, twin._owned = self.length, self._buffer, False
        self._promised = max(self._promised, self.length)
        return twin

    def nbytes(self) -> int:
        """Bytes of the buffer, spare capacity included."""
        return 0 if self._buffer is None else self._buffer.numel() * self._buffer.element_size()

    def _adopt(self, buffer: torch.Tensor) -> None:
        self._buffer, self._owned, self._promised = buffer, True, 0
