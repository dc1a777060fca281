"""NUMA: memory that a GPU reads lies on the node whose bus the GPU is on."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_kvret.stores.driver import bus_id

_SYSFS = Path("/sys")


class _Numbers(NamedTuple):
    """Of system calls, which the C library has no functions for."""

    mbind: int
    get_mempolicy: int


_NUMBERS = {"x86_64": _Numbers(237, 239), "aarch64": _Numbers(235, 236)}
# MPOL_DEFAULT and MPOL_PREFERRED
_DEFAULT, _PREFERRED = 0, 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@cache
def node_of(index: int) -> int | None:
    """The NUMA node of GPU ``index``; None for one node only, or where it is not known."""
    where = bus_id(index)
    return None if where is None else node_at(where, _SYSFS)


def node_at(bus_id: str, sysfs: Path) -> int | None:
    """``node_of`` a device of PCI, as the system's files below ``sysfs`` have it."""
    try:
        node = int((sysfs / "bus/pci/devices" / bus_id / "numa_node").read_text())
        nodes = _numbers((sysfs / "devices/system/node/has_memory").read_text())
    except (OSError, ValueError):
        return None
    # -1 where the firmware does not say.
    return node if len(nodes) > 1 and node in nodes else None


def prefer(raw: torch.Tensor, node: int) -> bool:
    """Take memory pages of ``raw`` from ``node`` when they are first used, while it has any left.

    Whether the system does so. It may not allow it (containers often don't), and where somebody
    has chosen nodes for this process, as with ``numactl``, that stays. Nothing fails then.

    Args:
        raw: ``[bytes]`` on the CPU, not used yet, that begins with a memory page.
        node: that has memory.
    """
    numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return False
    policy = ctypes.c_int(-1)
    nothing = ctypes.c_void_p()
    _call(numbers.get_mempolicy, ctypes.byref(policy), nothing, 0, nothing, 0)
    if policy.value != _DEFAULT:
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    # The system leaves out the last bit of those that it is told of.
    bits = words * _WORD_BITS + 1
    address = ctypes.c_void_p(raw.data_ptr())
    return _call(numbers.mbind, address, raw.nbytes, _PREFERRED, mask, bits, 0) == 0


def _call(number: int, *args: Any) -> int:
    """Of a system call 0, or -1 where it failed."""
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in args]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *words))


def _numbers(spans: str) -> set[int]:
    """Of ``"0-2,5"``: 0, 1, 2 and 5."""
    numbers: set[int] = set()
    for span in filter(None, spans.strip().split(",")):
        first, _, last = span.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
