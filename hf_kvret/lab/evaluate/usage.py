"""What several readers of one cell took, summed up for its row."""

from __future__ import annotations

from typing import Any

from hf_kvret.lab.evaluate.reader import Reader, Usage


class UsageSum:
    """Rows and seconds summed over readers; bytes of the last one.

    Attributes:
        rows_read, rows_cold: as in ``Usage``.
        seconds: of forward passes.
    """

    def __init__(self) -> None:
        self.rows_read, self.rows_cold, self.seconds = 0, 0, 0.0
        self._last: Usage | None = None

    def add(self, reader: Reader) -> None:
        """Count what ``reader`` took since it was made or forked."""
        self.count(reader.usage(), reader.seconds)

    def count(self, usage: Usage, seconds: float) -> None:
        """Count rows and seconds; the bytes of ``usage`` are the last ones now."""
        self._last = usage
        self.rows_read += usage.rows_read
        self.rows_cold += usage.rows_cold
        self.seconds += seconds

    @property
    def read_ratio(self) -> float | None:
        """Share of the cold rows that was read; None before anything was cold."""
        return self.rows_read / self.rows_cold if self.rows_cold else None

    def row(self, seconds: str = "seconds") -> dict[str, Any]:
        """The numbers as a part of a row; ``seconds`` is the name of the time."""
        assert self._last is not None, "no reader was added"
        held = ("device_bytes", "host_bytes", "full_bytes", "step_bytes")
        return {
            "read_ratio": self.read_ratio,
            **{name: getattr(self._last, name) for name in held},
            seconds: self.seconds,
        }
