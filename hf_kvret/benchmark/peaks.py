"""The most device memory that was allocated at a time, as torch counts it on CUDA."""

from __future__ import annotations

import torch

from hf_kvret.benchmark.timing import synchronize


def restart_peak(device: torch.device) -> int:
    """Forget the peak so far; returns bytes allocated now, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def device_peak(device: torch.device, base: int) -> int | None:
    """Bytes of the peak above ``base``; None on a CPU, where torch does not count."""
    if device.type != "cuda":
        return None
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - base
