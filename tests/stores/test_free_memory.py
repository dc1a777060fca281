"""The host memory that a process can still take, read from files that a test wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_kvret.stores import free_memory
from hf_kvret.stores.free_memory import free_host_bytes

MIB = 2**20
SYSTEM = 8000 * MIB


class Machine:
    """Directories in place of ``/proc`` and ``/sys/fs/cgroup``."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write("proc/meminfo", f"MemTotal: 9999999 kB\nMemAvailable:  {SYSTEM // 1024} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group_v2(self, folder: str, limit: int | str, usage: int, stat: str = "") -> None:
        self.write(f"cgroup{folder}/memory.max", f"{limit}\n")
        self.write(f"cgroup{folder}/memory.current", f"{usage}\n")
        self.write(f"cgroup{folder}/memory.stat", stat)

    def group_v1(self, folder: str, limit: int, usage: int, stat: str = "") -> None:
        self.write(f"cgroup/memory{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"cgroup/memory{folder}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"cgroup/memory{folder}/memory.stat", stat)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With 8000 MiB available and no cgroup."""
    machine = Machine(tmp_path)
    monkeypatch.setattr(free_memory, "PROC", machine.proc)
    monkeypatch.setattr(free_memory, "CGROUPS", machine.cgroups)
    return machine


def test_this_machine_has_some() -> None:
    free = free_host_bytes()
    assert free is None or 0 < free < 2**50


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
def test_a_container_of_version_2_has_what_its_limit_leaves(
    machine: Machine, limit: int | str | None, usage: int, expected: int
) -> None:
    if limit is not None:
        machine.write("proc/self/cgroup", "0::/\n")
        machine.group_v2("", limit, usage)
    assert free_host_bytes() == expected


def test_page_cache_counts_as_free(machine: Machine) -> None:
    stat = "anon 123\nfile 999\n{0}inactive_file 104857600\n{0}active_file 52428800\nshmem 7\n"
    machine.write("proc/self/cgroup", "0::/\n")
    machine.group_v2("", 1000 * MIB, 1000 * MIB, stat.format(""))
    assert free_host_bytes() == 150 * MIB
    # Version 1 has both its own page cache and, total_, that of the groups below.
    machine.write("proc/self/cgroup", "4:memory:/\n")
    machine.group_v1("", 1000 * MIB, 950 * MIB, stat.format("total_") + "inactive_file 5\n")
    machine.write("cgroup/memory.max", "max\n")
    assert free_host_bytes() == 200 * MIB


def test_every_group_above_the_process_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/user.slice/session.scope\n")
    machine.group_v2("/user.slice", 2000 * MIB, 500 * MIB)
    machine.group_v2("/user.slice/session.scope", "max", 300 * MIB)
    machine.group_v2("/other.slice", 10 * MIB, 0)
    assert free_host_bytes() == 1500 * MIB
    machine.group_v2("/user.slice/session.scope", 400 * MIB, 300 * MIB)
    assert free_host_bytes() == 100 * MIB


def test_above_memory_high_a_group_is_slowed_down(machine: Machine) -> None:
    machine.group_v2("", 2000 * MIB, 500 * MIB)
    machine.write("cgroup/memory.high", f"{900 * MIB}\n")
    assert free_host_bytes() == 400 * MIB


def test_version_1_has_its_controller_in_a_folder(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/jobs/1\n0::/\n")
    machine.group_v1("", 2**63 - 4096, 4000 * MIB)
    machine.group_v1("/jobs/1", 600 * MIB, 100 * MIB)
    assert free_host_bytes() == 500 * MIB


@pytest.mark.parametrize("path", ["/docker/0123", "/../other"])
def test_a_path_of_the_host_leads_to_the_root_of_the_container(machine: Machine, path: str) -> None:
    machine.write("proc/self/cgroup", f"4:memory:{path}\n0::{path}\n")
    machine.write("other/memory.max", "1\n")
    machine.write("other/memory.current", "0\n")
    machine.group_v1("", 600 * MIB, 100 * MIB)
    assert free_host_bytes() == 500 * MIB


def test_mapped_data_files_are_in_use_though_they_are_page_cache(machine: Machine) -> None:
    maps = (
        "10000000-16400000 rw-p 00000000 08:01 7 /models/my model.safetensors\n"  # 100 MiB
        "20000000-20100000 r--p 00000000 08:01 8 /lib/libtorch.so\n"
        "20100000-20200000 r-xp 00100000 08:01 8 /lib/libtorch.so\n"
        "30000000-31000000 rw-s 00000000 00:05 9 /dev/shm/queue\n"
        "40000000-50000000 rw-p 00000000 00:00 0 \n"
        "7ffd0000-7ffd1000 rw-p 00000000 00:00 0 [stack]\n"
    )
    machine.write("proc/self/maps", maps)
    assert free_host_bytes() == SYSTEM - 100 * MIB
    machine.group_v2("", 1000 * MIB, 950 * MIB)
    assert free_host_bytes() == 0, "never negative"


def test_what_cannot_be_read_is_left_out(machine: Machine) -> None:
    machine.group_v2("", "max", 0)
    machine.write("cgroup/memory.max", "")
    machine.write("cgroup/memory.current", "")
    assert free_host_bytes() == SYSTEM
    (machine.proc / "meminfo").unlink()
    (machine.proc / "meminfo").mkdir()
    machine.group_v2("", 700 * MIB, 200 * MIB)
    free = free_host_bytes()
    # The system is asked otherwise, which may have less than the 500 MiB that are left here.
    assert free is not None and 0 < free <= 500 * MIB


def test_where_nobody_says_it_is_unknown(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.proc / "meminfo").unlink()
    monkeypatch.setattr(free_memory.os, "sysconf_names", {"SC_AVPHYS_PAGES": 1, "SC_PAGE_SIZE": 2})
    monkeypatch.setattr(
        free_memory.os, "sysconf", {"SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.get
    )
    assert free_host_bytes() == 40960
    monkeypatch.setattr(free_memory.os, "sysconf", lambda name: -1)
    assert free_host_bytes() is None
    monkeypatch.setattr(free_memory.os, "sysconf_names", {"SC_PAGE_SIZE": 2})  # macOS
    assert free_host_bytes() is None
    monkeypatch.delattr(free_memory.os, "sysconf_names")  # Windows
    assert free_host_bytes() is None
