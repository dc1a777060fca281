"""Clocks for a device, how fast its memory and its way to the host are, rows of timed calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_kvret.lab.evaluate.measurement import Measurement, Row
from hf_kvret.lab.report.environment import describe_environment

_REPEATS = 10
_CUDA_BYTES = 1 << 30
_CPU_BYTES = 1 << 27
_BUS_BYTES = 1 << 28


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Seconds between marks: CUDA events in the stream, or the wall clock on a CPU.

    Events cost no synchronization, so steps follow each other as they do in a generation that
    doesn't stop to look at its tokens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """The end of one interval and the beginning of the next."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The intervals, one fewer than marks; waits for the device."""
        synchronize(self._device)
        if self._device.type == "cuda":
            pairs = zip(self._events, self._events[1:], strict=False)
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second that were reached in this run.

    Attributes:
        device: reading and writing device memory.
        host: copying pinned host memory to the device; on a CPU the same as ``device``.
    """

    device: float
    host: float


@torch.inference_mode()
def measure_bandwidth(device: torch.device) -> Bandwidth:
    """The best of ten copies inside the memory (read and written bytes count) and ten sums over it.

    The best, not the median: a floor is what no step can undercut.
    """
    size = _CUDA_BYTES if device.type == "cuda" else _CPU_BYTES
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copies = 2 * size / _quickest(device, lambda: target.copy_(source))
    sums = size / _quickest(device, source.sum)
    if device.type != "cuda":
        return Bandwidth(max(copies, sums), max(copies, sums))
    pinned = torch.ones(_BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    arrival = torch.empty(_BUS_BYTES, dtype=torch.uint8, device=device)
    bus = _BUS_BYTES / _quickest(device, lambda: arrival.copy_(pinned, non_blocking=True))
    return Bandwidth(max(copies, sums), bus)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, interpolated; ValueError for no values."""
    if not values:
        raise ValueError("no values to take quartiles of")
    points = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(points).tolist()
    return low, middle, high


def describe(measurement: Measurement, options: Iterable[str], machine: Iterable[str]) -> Row:
    """For a set-up: the values of ``options``, and what the environment says of ``machine``."""
    here = describe_environment()
    return {name: getattr(measurement, name) for name in options} | {
        name: here[name] for name in machine
    }


def _quickest(device: torch.device, work: Callable[[], Any]) -> float:
    work()
    clock = StepClock(device)
    clock.mark()
    for _ in range(_REPEATS):
        work()
        clock.mark()
    return min(clock.seconds())
