"""Memory that this process can still take: of a GPU, and of the host as Linux says it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Device memory that torch can still give out, its own cache included; None: not a GPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_host_bytes() -> int | None:
    """Bytes that this process can take without swapping or being killed; None: nobody says.

    The least of what the system has available and what each cgroup (version 2) above the process
    leaves of its limit; page cache counts as free in both. macOS and Windows say nothing.
    """
    rooms = list(_cgroup_rooms())
    for line in _lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            rooms.append(1024 * int(line.split()[1]))
    return max(0, min(rooms)) if rooms else None


def _cgroup_rooms() -> Iterator[int]:
    """Bytes left in each cgroup of the process that has a limit, from its own to the root."""
    paths = [line[3:] for line in _lines(PROC / "self" / "cgroup") if line.startswith("0::")]
    # A container may see a path of its host, of which only the root exists here.
    folders = [name for path in paths for name in path.split("/") if name and ".." not in path]
    for depth in range(len(folders), -1, -1):
        group = CGROUPS.joinpath(*folders[:depth])
        limits = [_number(group / name) for name in ("memory.max", "memory.high")]
        known = [limit for limit in limits if limit is not None]
        usage = _number(group / "memory.current")
        if known and usage is not None:
            yield min(known) - usage + _page_cache(group)


def _page_cache(group: Path) -> int:
    fields = (line.split() for line in _lines(group / "memory.stat"))
    return sum(int(size) for name, size in fields if name in ("inactive_file", "active_file"))


def _number(path: Path) -> int | None:
    """The number that ``path`` holds; None for ``max``, or where there is none."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    """Lines of a file of the system; none where it can't be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
