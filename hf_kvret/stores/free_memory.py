"""Memory that this process can still take: of a GPU, and of the host as Linux says it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

_MAX = 2**63 - 1


@dataclass(frozen=True)
class _Version:
    """Names of the files and fields of a version of the memory controller."""

    controller: str
    folder: str
    limits: tuple[str, ...]
    usage: str
    page_cache: tuple[str, ...]


_VERSIONS = (
    _Version(
        controller="",
        folder="",
        limits=("memory.max", "memory.high"),
        usage="memory.current",
        page_cache=("inactive_file", "active_file"),
    ),
    _Version(
        controller="memory",
        folder="memory",
        limits=("memory.limit_in_bytes",),
        usage="memory.usage_in_bytes",
        page_cache=("total_inactive_file", "total_active_file"),
    ),
)


def free_bytes(device: torch.device) -> int | None:
    """Device memory that torch can still give out, its own cache included; None: not a GPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_host_bytes() -> int | None:
    """Bytes that this process can take without swapping or being killed; None: nobody says.

    The least of what the system has available and what each cgroup above the process leaves of its
    limit, in version 1 or 2; page cache counts as free in both. Data files that the process maps
    are taken off: weights that transformers loads in the dtype of their file stay mapped, and
    count as page cache though every step reads them.

    The system is asked by ``MemAvailable`` of ``/proc/meminfo``, and elsewhere by the free pages of
    ``os.sysconf``, page cache not among them. macOS and Windows have neither: None.
    """
    system = _available()
    rooms = ([] if system is None else [system]) + [
        room for version in _VERSIONS for room in _cgroup_rooms(version)
    ]
    return max(0, min(rooms) - _mapped_bytes()) if rooms else None


def _available() -> int | None:
    """Bytes that the system can give out; None: it doesn't say."""
    for line in _lines(PROC / "meminfo"):
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return int(size.split()[0]) * 1024
    names = getattr(os, "sysconf_names", {})
    if not {"SC_AVPHYS_PAGES", "SC_PAGE_SIZE"} <= names.keys():
        return None
    count, size_bytes = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return count * size_bytes if min(count, size_bytes) >= 0 else None


def _cgroup_rooms(version: _Version) -> Iterator[int]:
    """Bytes left in each cgroup of the process that has a limit, from its own to the root."""
    folders = _cgroup_path(version.controller)
    for depth in range(len(folders), -1, -1):
        # A container may see a path of its host, of which only the root exists here.
        group = CGROUPS.joinpath(version.folder, *folders[:depth])
        limits = [_number(group / name) for name in version.limits]
        limit = min((limit for limit in limits if limit is not None), default=_MAX)
        usage = _number(group / version.usage)
        if limit < _MAX and usage is not None:
            yield max(0, limit - usage + _page_cache(group, version.page_cache))


def _cgroup_path(controller: str) -> list[str]:
    """Names from the root to the cgroup of the process; none where it lies outside of the root."""
    for line in _lines(PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            folders = [folder for folder in path.split("/") if folder]
            return [] if ".." in folders else folders
    return []


def _page_cache(group: Path, names: tuple[str, ...]) -> int:
    fields = (line.partition(" ") for line in _lines(group / "memory.stat"))
    return sum(int(size) for name, _, size in fields if name in names)


def _mapped_bytes() -> int:
    """Bytes of the data files that the process maps; programs and shared memory left out."""
    sizes: dict[str, int] = {}
    programs: set[str] = set()
    for line in _lines(PROC / "self" / "maps"):
        addresses, mode, _, _, inode, *path = line.split(maxsplit=5)
        if inode == "0" or not path or path[0].startswith(("/dev/", "/memfd:", "/SYSV")):
            continue
        first, _, end = addresses.partition("-")
        sizes[path[0]] = sizes.get(path[0], 0) + int(end, 16) - int(first, 16)
        if "x" in mode:
            programs.add(path[0])
    return sum(size for path, size in sizes.items() if path not in programs)


def _number(path: Path) -> int | None:
    """The number that ``path`` holds; None for ``max``, or where there is none."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    """Lines of a file of the system; none where it can't be read."""
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
