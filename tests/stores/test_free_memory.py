"""The host memory that a process can still take, read from files that a test wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_kvret.stores import free_memory
from hf_kvret.stores.free_memory import free_host_bytes

MIB = 2**20
SYSTEM = 8000 * MIB


class Machine:
    """Folders in place of ``/proc`` and ``/sys/fs/cgroup``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.write("proc/meminfo", f"MemTotal: 9999999 kB\nMemAvailable:  {SYSTEM // 1024} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, folder: str, limit: int | str, usage: int, stat: str = "") -> None:
        self.write(f"cgroup{folder}/memory.max", f"{limit}\n")
        self.write(f"cgroup{folder}/memory.current", f"{usage}\n")
        self.write(f"cgroup{folder}/memory.stat", stat)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With 8000 MiB available and no cgroup."""
    monkeypatch.setattr(free_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(free_memory, "CGROUPS", tmp_path / "cgroup")
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [
        (None, 0, SYSTEM),  # no cgroup
        (1000 * MIB, 300 * MIB, 700 * MIB),
        (1000 * MIB, 1200 * MIB, 0),  # a limit that was lowered
        ("max", 300 * MIB, SYSTEM),
        (90000 * MIB, 300 * MIB, SYSTEM),
    ],
)
def test_a_container_has_what_its_limit_leaves(
    machine: Machine, limit: int | str | None, usage: int, expected: int
) -> None:
    if limit is not None:
        machine.write("proc/self/cgroup", "0::/\n")
        machine.group("", limit, usage)
    assert free_host_bytes() == expected


def test_page_cache_counts_as_free(machine: Machine) -> None:
    stat = "anon 123\nfile 999\ninactive_file 104857600\nactive_file 52428800\nshmem 7\n"
    machine.group("", 1000 * MIB, 1000 * MIB, stat)
    assert free_host_bytes() == 150 * MIB


def test_every_group_above_the_process_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/jobs\n0::/user.slice/session.scope\n")
    machine.group("/user.slice", 2000 * MIB, 500 * MIB)
    machine.group("/user.slice/session.scope", "max", 300 * MIB)
    assert free_host_bytes() == 1500 * MIB
    machine.group("/user.slice/session.scope", 900 * MIB, 300 * MIB)
    machine.write("cgroup/user.slice/session.scope/memory.high", f"{400 * MIB}\n")
    assert free_host_bytes() == 100 * MIB


@pytest.mark.parametrize("path", ["/docker/0123", "/../other"])
def test_a_path_of_the_host_leads_to_the_root_of_the_container(machine: Machine, path: str) -> None:
    machine.write("proc/self/cgroup", f"0::{path}\n")
    machine.write("other/memory.max", "1\n")
    machine.write("other/memory.current", "0\n")
    machine.group("", 600 * MIB, 100 * MIB)
    assert free_host_bytes() == 500 * MIB


def test_where_nobody_says_it_is_unknown(machine: Machine) -> None:
    machine.write("proc/meminfo", "")
    assert free_host_bytes() is None
