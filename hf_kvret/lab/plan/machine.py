"""The memory of a machine, and how much of a cache fits into it beside a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvret.lab.bench.shapes import WeightBytes
from hf_kvret.lab.plan.prediction import CacheBytes, Predictor
from hf_kvret.stores.free_memory import free_host_bytes

# The search for the largest context ends at so many tokens.
_MOST_TOKENS = 1 << 30
_STEPS = 64


def find_memory(device: int | None, host: int | None) -> tuple[int, int | None, str]:
    """Bytes of the device, bytes of the host, and in words whose memory that is.

    None for the host: the device is the CPU, and all is in its memory. Without ``device`` it is the
    memory that is free on this machine now; ``host`` replaces its part. Among several GPUs the one
    that torch uses by default counts.

    Raises:
        ValueError: ``host`` alone on a machine without a GPU, or a system that doesn't say how much
            memory is free.
    """
    if device is not None:
        return device, host, "as given by the options"
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        gpu = f"this machine's GPU ({torch.cuda.get_device_name()})"
        if host is not None:
            return free, host, f"what is free on {gpu}, and the host as given by the option"
        return free, _free_host(), f"what is free on this machine and on {gpu}"
    if host is not None:
        raise ValueError(
            f"--host-memory {host} without --device-memory: this machine has no GPU whose memory "
            "could be taken; give both, or neither"
        )
    return _free_host(), None, "what is free on this machine, which has no GPU"


def _free_host() -> int:
    free = free_host_bytes()
    if free is None:
        raise ValueError(
            "this system doesn't say how much memory is free: give --device-memory, as 16GB"
        )
    return free


@dataclass(frozen=True)
class Machine:
    """The memory of a machine, and how fast it is read.

    Attributes:
        device: bytes of device memory.
        host: bytes of host memory; None: the device is the CPU, and all is in its memory.
        reserve: bytes of device memory that stay free for passes.
        origin: whose memory that is, in words.
        device_speed, host_speed, bus_speed: bytes a second.
    """

    device: int
    host: int | None
    reserve: int
    origin: str
    device_speed: float
    host_speed: float
    bus_speed: float

    def fits(self, weights: WeightBytes, cache: CacheBytes) -> bool:
        """Whether weights and cache fit at the same time."""
        free = self.device - self.reserve - weights.held
        if self.host is None:
            return cache.device + cache.host <= free
        return cache.device <= free and cache.host <= self.host

    def seconds(self, weights: WeightBytes, cache: CacheBytes, batch: int) -> float:
        """The time of all reads of a decode step at full speed."""
        near = weights.read + batch * weights.row + cache.read_device
        if self.host is None:
            return (near + cache.read_bus + cache.read_cpu) / self.device_speed
        far = cache.read_bus / self.bus_speed + cache.read_cpu / self.host_speed
        return near / self.device_speed + far


def largest_context(
    machine: Machine, weights: WeightBytes, predictor: Predictor, batch: int
) -> int:
    """The most tokens of each of ``batch`` sequences that fit; 0 for none.

    Below ``predictor.even_len`` it is a multiple of a 64th of that, rounded down.
    """

    def fits(length: int) -> bool:
        return machine.fits(weights, predictor.at(length).of_batch(batch))

    even_len, step = predictor.even_len, predictor.even_len // _STEPS
    if not fits(even_len):
        return step * _largest(lambda count: fits(count * step), _STEPS)
    return even_len + _largest(lambda tokens: fits(even_len + tokens), _MOST_TOKENS)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest count up to ``most`` that ``fits``, if all smaller ones do; 0 for none."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
