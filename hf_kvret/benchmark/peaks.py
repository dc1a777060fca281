"""The most memory that was used at a time: of a CUDA device as torch counts it, of this process."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_kvret.benchmark.limits import lines_of
from hf_kvret.benchmark.timing import synchronize


class PeakDeviceMemory:
    """The most memory of a CUDA device that tensors took at a time since it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self.restart()

    def restart(self) -> int | None:
        """Forget the peak so far; returns bytes allocated now, None on a CPU."""
        if self._device.type != "cuda":
            return None
        synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def growth(self) -> int | None:
        """Bytes of the peak above where it began; None on a CPU, where torch does not count."""
        if self._start is None:
            return None
        synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._start


class PeakHostMemory:
    """The most host memory of this process since it was made. Linux only.

    It counts pages that the process touched, whatever for: caches, buffers of the model, memory
    that an allocator keeps for later. Freed memory that is used again doesn't count twice.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._start: int | None = _status("VmRSS")
        except OSError:
            self._start = None

    def growth(self) -> int | None:
        """Bytes of the peak above where it began; None where the system doesn't say."""
        peak = _status("VmHWM")
        return None if self._start is None or peak is None else max(0, peak - self._start)


def _status(field: str) -> int | None:
    for line in lines_of(Path("/proc/self/status")):
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
