"""HostMemory's chunks: where they begin, what the system is asked, and how long they live."""

import ctypes
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hf_kvret.contracts import host_memory, token_buffer
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PendingCopies

CPU = torch.device("cpu")
HUGE_PAGE = 2 << 20
# Not a whole number of huge pages, nor of pages: 6 MiB and 192 bytes.
LARGE = (3, (2 << 20) // 2 + 32)
LARGE_DTYPE = torch.bfloat16

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="the mappings of a process are not to be seen"
)


def _mapping(address: int) -> dict[str, str]:
    """What the system says of the mapping that holds ``address``; empty where there is none."""
    result, inside = dict[str, str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            low, high = (int(bound, 16) for bound in name.split("-"))
            inside = low <= address < high
            if inside:
                result["start"], result["end"] = str(low), str(high)
        elif inside:
            result[name[:-1]] = rest.strip()
    return result


def test_a_device_without_room_names_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(host_memory, "empty", full)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        DeviceMemory(torch.device("cpu")).allocate((2, 64, 2**20), torch.float32)
    (note,) = caught.value.__notes__
    assert "0.50 GiB more for its rows" in note and "store='host'" in note


@needs_linux
def test_huge_pages_are_asked_for_the_chunk_alone_and_live_as_long_as_a_view() -> None:
    index = token_buffer.TokenBuffer().reserve(1 << 16, torch.empty(1, 1, 0, 128))
    chunk = HostMemory(CPU).allocate(LARGE, LARGE_DTYPE).fill_(3.0)
    tail = _mapping(chunk.data_ptr() + chunk.nbytes - 1)
    address, nbytes, view = chunk.data_ptr(), chunk.nbytes, chunk[1, 7:9]
    del chunk
    first = _mapping(address)
    if "VmFlags" not in first:
        pytest.skip("this kernel does not tell what was asked")
    assert "hg" in first["VmFlags"].split() and "hg" not in tail["VmFlags"].split()
    assert "hg" in _mapping(index.data_ptr())["VmFlags"].split()
    assert int(first["end"]) == address + nbytes // HUGE_PAGE * HUGE_PAGE
    assert view.tolist() == [3.0, 3.0]
    del view
    # Another mapping may have taken the place; it was not asked to be huge.
    assert "hg" not in _mapping(address).get("VmFlags", "").split()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="nothing to refuse")
def test_a_system_without_huge_pages_gives_good_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Refusing(mmap.mmap):
        def madvise(self, *options: int) -> None:
            calls.extend(options)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    chunk = HostMemory(CPU).allocate(LARGE, LARGE_DTYPE).fill_(2.0)
    assert calls and chunk.float().sum().item() == 2.0 * chunk.numel()


@pytest.mark.skipif(sys.maxsize < 2**40, reason="sizes beyond the address space are not to be had")
def test_what_does_not_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(MemoryError, match=r"GiB of host memory.*use shorter prompts"):
        HostMemory(CPU).allocate((1 << 52,), torch.uint8)


@needs_linux
def test_a_child_process_finds_zeros_and_may_free_them() -> None:
    size = 3 * HUGE_PAGE
    chunk = host_memory.mapped(size, inherited=False).fill_(1)
    assert chunk.untyped_storage().nbytes() == size
    child = os.fork()
    if child == 0:
        # Nothing but this: pytest goes on in the parent alone.
        elements = bytes((ctypes.c_char * size).from_address(chunk.data_ptr()))
        other = mmap.mmap(-1, 64 << 20)
        del chunk
        other[-1:] = b"x"
        os._exit(0 if not any(elements) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert chunk.sum() == size


@dataclass
class _Copy:
    """The event of a copy, which ends when it is waited for, or is set to."""

    name: str
    log: list[str]
    ended: bool = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.log.append(self.name)
        self.ended = True


def test_the_oldest_copies_are_waited_for_when_too_much_is_pending() -> None:
    """Those that ended are forgotten; the newest is never waited for, however large it is."""
    log: list[str] = []
    copies, ended = PendingCopies(100), _Copy("b", log)
    for copy, size, waited in (
        (_Copy("a", log), 40, []),
        (ended, 60, []),
        (_Copy("c", log), 1, ["a"]),
        (_Copy("d", log), 90, ["a"]),
        (_Copy("e", log), 1000, ["a", "c", "d"]),
    ):
        ended.ended = copy.name == "d"
        copies.add(copy, size)
        assert log == waited and copies.nbytes <= max(100, size)
