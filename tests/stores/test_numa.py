"""Pinned chunks lie on the NUMA node of the GPU that reads them."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_kvret.stores import driver, memory, numa, pinning
from hf_kvret.stores.host_memory import mapped
from hf_kvret.stores.memory import HostMemory, SplitMemory

from ..simulated_gpu.device import simulated

pytest.importorskip("triton")

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
WHERE = "0000:ca:00.0"


def tree(folder: Path, node: str | None, nodes: str | None) -> Path:
    """Files as the system has them; None for one that is not there."""
    for name, text in (
        (f"bus/pci/devices/{WHERE}/numa_node", node),
        ("devices/system/node/has_memory", nodes),
    ):
        if text is not None:
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("node", "nodes", "expected"),
    [
        ("0\n", "0-1\n", 0),
        ("1\n", "0-1\n", 1),
        ("3\n", "0,2-3\n", 3),
        # One node, none that is told, and one without memory.
        ("0\n", "0\n", None),
        ("-1\n", "0-1\n", None),
        ("1\n", "0,2-3\n", None),
        (None, "0-1\n", None),
        ("0\n", None, None),
        ("", "0-1\n", None),
        ("0\n", "", None),
    ],
)
def test_the_node_of_a_gpu_is_what_the_system_says(
    tmp_path: Path, node: str | None, nodes: str | None, expected: int | None
) -> None:
    assert numa.node_at(WHERE, tree(tmp_path, node, nodes)) == expected
    assert numa.node_at("0000:01:00.0", tmp_path) is None


@pytest.mark.parametrize("status", [0, 1])
def test_the_driver_says_where_a_gpu_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    def bus_id(name: Any, size: int, device: Any) -> int:
        assert size == len(name) and device.value == 5
        name.value = WHERE.upper().encode()
        return status

    def get(device: Any, index: int) -> int:
        device._obj.value = index + 2
        return 0

    library = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGet=get, cuDeviceGetPCIBusId=bus_id)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    assert driver.bus_id(3) == (None if status else WHERE)
    monkeypatch.setattr(numa, "_SYSFS", tree(tmp_path, "1", "0-1"))
    assert numa.node_of.__wrapped__(3) == (None if status else 1)


class System:
    """Stands in for system calls, and notes those of mbind."""

    def __init__(self, policy: int = 0, status: int = 0) -> None:
        self.bound: list[tuple[int, ...]] = []
        self._policy, self._status = policy, status

    def __call__(self, number: int, *args: Any) -> int:
        if number == 239:
            args[0]._obj.value = self._policy
            return 0
        assert number == 237
        address, size, mode, mask, bits, flags = args
        self.bound.append((address.value, size, mode, *mask, bits, flags))
        return self._status


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    system = System()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(numa, "_call", system)
    return system


@pytest.mark.parametrize(("node", "mask"), [(0, (1,)), (1, (2,)), (70, (0, 64))])
def test_pages_are_asked_of_one_node(system: System, node: int, mask: tuple[int, ...]) -> None:
    raw = mapped(3 * mmap.PAGESIZE)
    assert numa.prefer(raw, node)
    assert system.bound == [(raw.data_ptr(), raw.nbytes, 1, *mask, 64 * len(mask) + 1, 0)]


def test_what_somebody_chose_for_the_process_stays(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy in (1, 2, 3, -1):
        system._policy = policy
        assert not numa.prefer(mapped(mmap.PAGESIZE), 1)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    system._policy = 0
    assert not numa.prefer(mapped(mmap.PAGESIZE), 1)
    assert not system.bound


def test_a_system_that_refuses_gives_memory_all_the_same(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system._status = -1
    monkeypatch.setattr(memory, "node_of", lambda index: 1)
    with simulated():
        assert HostMemory(GPU).allocate((4, 8), torch.float32).is_pinned()
    assert len(system.bound) == 1


def test_chunks_that_a_gpu_reads_are_on_its_node(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "node_of", lambda index: index + 1)
    with simulated(2):
        for index, make in enumerate((HostMemory, lambda gpu: SplitMemory(gpu, 0))):
            host = make(torch.device("cuda", index))
            chunks = [host.allocate((4, 8), torch.float32)]
            chunks.append(host.take(host.prepare((4, 8), torch.float32)))
            expected = [(x.data_ptr(), 4096, 1, 2 << index, 65, 0) for x in chunks]
            assert system.bound == expected
            system.bound.clear()
        # The CPU reads these; and here the system knows nothing.
        HostMemory(GPU, CPU).allocate((4, 8), torch.float32)
        monkeypatch.setattr(memory, "node_of", lambda index: None)
        HostMemory(GPU).allocate((4, 8), torch.float32)
    HostMemory(CPU).allocate((4, 8), torch.float32)
    assert not system.bound


def test_this_system_takes_the_advice() -> None:
    maps = Path("/proc/self/numa_maps")
    raw = mapped(16 << 20, inherited=False)
    if not (maps.exists() and numa.prefer(raw, 0)):
        pytest.skip("no NUMA here, or no leave to choose nodes")
    ctypes.memset(raw.data_ptr(), 1, raw.nbytes)
    (line,) = (
        line for line in maps.read_text().splitlines() if line.startswith(f"{raw.data_ptr():x} ")
    )
    assert " prefer:0 " in line and "N0=" in line
    assert pinning.Chunk((1,), torch.uint8, GPU) != pinning.Chunk((1,), torch.uint8, GPU, 0)
