"""The memory that ``hf-kvret fits`` counts with: as given, or what is free on this machine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_kvret.stores.free_memory import free_host_bytes


class Memory(NamedTuple):
    """Bytes of a device and of a host.

    Attributes:
        device: bytes of device memory.
        host: bytes of host memory; None: the device is the CPU, and all is in its memory.
        origin: whose memory that is, in words.
    """

    device: int
    host: int | None
    origin: str


def find_memory(device: int | None, host: int | None) -> Memory:
    """The memory that was given; where ``device`` is None, what is free on this machine now.

    Of several GPUs the one that torch uses by default counts. A ``host`` that was given stands for
    what is free in host memory.

    Raises:
        ValueError: ``host`` alone on a machine without a GPU, or a system that doesn't say how much
            memory is free.
    """
    if device is not None:
        return Memory(device, host, "as given by the options")
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        gpu = f"this machine's GPU ({torch.cuda.get_device_name()})"
        if host is not None:
            return Memory(free, host, f"what is free on {gpu}, and the host as given by the option")
        return Memory(free, _free_here(), f"what is free on this machine and on {gpu}")
    if host is not None:
        raise ValueError(
            f"--host-memory {host} without --device-memory: this machine has no GPU whose memory "
            "could be taken; give both, or neither"
        )
    return Memory(_free_here(), None, "what is free on this machine, which has no GPU")


def _free_here() -> int:
    free = free_host_bytes()
    if free is None:
        raise ValueError(
            "this system doesn't say how much memory is free: give --device-memory, as 16GB"
        )
    return free
