"""Placement of cold rows by ``store="auto"``, by the memory that is free."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_kvret.options.config import RetrievalConfig

_log = logging.getLogger(__name__)

ROOT = Path("/")

CODED = ("higgs", "higgs-host")
"""Names of stores whose rows only a store of these can load."""

UNCODED = 16
"""Bits of an element that is not coded."""


def choose(device: torch.device, rows_bytes: int, options: RetrievalConfig) -> tuple[str, str]:
    """The name of a store, and why: on the device or, from a GPU that lacks room, on the host.

    Where there is too little memory, the last of these is taken all the same, with a warning. Rows
    may take a share of what is free: a pass and an index need the rest.

    Args:
        device: of the queries.
        rows_bytes: of all layers, once all expected tokens are there.
        options: of the cache; they know which stores they take.
    """
    # The store, what its memory is called, how much of it is free, and the share for rows.
    if device.type == "cpu":
        places = [("device", "memory", free_host_bytes(), 0.5)]
    else:
        places = [("device", f"{device.type} memory", free_bytes(device), 0.25)]
    if device.type == "cuda":
        places.append(("host", "host memory", free_host_bytes(), 0.8))
    reasons = []
    for store, memory, free, share in places:
        fits = free is None or rows_bytes <= free * share
        if free is None:
            reasons.append(f"{store}: how much {memory} is free is unknown here")
        else:
            words = "fit" if fits else "do not fit"
            reasons.append(
                f"{store}: {size_text(rows_bytes)} of rows {words} into {share:.0%} of "
                f"{size_text(free)} of free {memory}"
            )
        if fits:
            break
    reason = "; ".join(reasons)
    if not fits:
        coded = "higgs" if device.type == "cpu" else "higgs-host"
        codes = f"pass store={coded!r} (rows in 2 to 4 bits, which change answers a little), "
        _log.warning(
            "store='auto' found too little memory and takes %r all the same: %s. The process may "
            "be killed: %stake a shorter prompt, a smaller batch, fewer max_new_tokens, or free "
            "memory",
            store,
            reason,
            codes if options.takes("store", coded) else "",
        )
    return store, reason


def free_bytes(device: torch.device) -> int | None:
    """Device memory that torch can still give out, its own cache included; None: not a GPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_host_bytes() -> int | None:
    """Bytes that this process can still take without swapping, page cache included.

    The machine has them, and the control groups of the process allow them, as a container's.
    None: nobody says, as on macOS and Windows.
    """
    lines = _lines(ROOT / "proc/meminfo")
    sizes = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return min([*sizes, *_left_by_groups()], default=None)


def _left_by_groups() -> Iterator[int]:
    """What each limited control group of this process leaves it (Linux cgroups, both versions)."""
    for line in _lines(ROOT / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        root = ROOT / "sys/fs/cgroup" / controllers
        group = root / path.lstrip("/")
        # A container sees its own group as the root, whatever path the host knows it by.
        for folder in {root, group, *group.parents}:
            limit, usage = (_lines(folder / f"memory.{name}") for name in names)
            if limit and usage and limit[0].isdecimal():
                stat = dict(line.split() for line in _lines(folder / "memory.stat"))
                kinds = ("active_file", "inactive_file")
                cache = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)
                yield max(0, int(limit[0]) - int(usage[0]) + cache)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


def size_text(size: int) -> str:
    """Bytes in GB or MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
