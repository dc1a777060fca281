"""Launches of Triton kernels on a simulated GPU: their arguments, and what they read and write."""

from typing import Any

import pytest
import torch

from hf_kvret_kernels.paged import PagedRows

from ..simulated_gpu.simulation import Simulation, SimulationError

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _add_kernel(x_ptr, y_ptr, count, block: tl.constexpr):  # type: ignore[no-untyped-def,name-defined]
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < count
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + 1.0, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _add_any_kernel(x_ptr, y_ptr, count, block: tl.constexpr):  # type: ignore[no-untyped-def,name-defined]
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < count
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + 1.0, mask=mask)


def add(x: torch.Tensor, y: torch.Tensor, blocks: int = 1, count: int = 16) -> None:
    _add_kernel[(blocks,)](x, y, count, block=16)


def test_a_kernel_runs_and_is_counted(gpu: Simulation) -> None:
    x, y = torch.zeros(16, device="cuda"), torch.zeros(16, device="cuda")
    gpu.phase = "step"
    add(x, y)
    add(y, x)
    assert x.tolist() == [2.0] * 16
    assert gpu.launches == {("step", "_add_kernel"): 2}
    assert not gpu.findings


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (("cuda:0", "cpu"), r"cpu tensor\?"),
        (("cuda:0", "cuda:1"), "tensors of cuda:0, cuda:1"),
        (("cuda:1", "cuda:1"), "while the current device is cuda:0"),
    ],
)
def test_wrong_pointers_are_refused(gpu: Simulation, places: tuple[str, str], message: str) -> None:
    x, y = (torch.zeros(16, device=place) for place in places)
    with pytest.raises(SimulationError, match=message):
        add(x, y)
    assert gpu.kinds == ["device"]


def test_what_begins_between_vectors_is_found(gpu: Simulation) -> None:
    x = torch.zeros(32, device="cuda")
    add(x[1:], x[1:], count=4)
    assert set(gpu.kinds) == {"alignment"}


@pytest.mark.parametrize("kernel", [_add_kernel, _add_any_kernel])
def test_another_specialisation_within_a_capture_is_found(gpu: Simulation, kernel: Any) -> None:
    """A number that a kernel is not specialised for may have any value."""
    x, y = torch.zeros(16, device="cuda"), torch.zeros(16, device="cuda")
    kernel[(1,)](x, y, 16, block=16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    last = ["compile"] if kernel is _add_kernel else []
    with torch.cuda.stream(side):
        for count, expected in ((16, []), (32, []), (7, last)):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            kernel[(1,)](x, y, count, block=16)
            graph.capture_end()
            assert gpu.kinds == expected


@pytest.mark.parametrize("waits", [False, True])
def test_rows_that_are_read_by_address_are_followed(gpu: Simulation, waits: bool) -> None:
    pages = torch.zeros(2, 1, 4, 16, device="cuda")
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    ids = torch.zeros(1, 1, 1, 2, dtype=torch.int32, device="cuda")
    rows, side = PagedRows([pages], table, 8), torch.cuda.Stream()
    rows.addresses()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pages.fill_(1.0)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    rows.gather(ids)
    assert set(gpu.kinds) == (set() if waits else {"race"})


def test_addresses_outside_of_all_memory_are_known(gpu: Simulation) -> None:
    own, other, host = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda:1"), torch.ones(4)
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    host[:1].zero_()
    logs = gpu.memories_at(own.device, [own.data_ptr() + 15, host.data_ptr() + 15])
    assert logs == [gpu.log_of(own), gpu.log_of(host)]
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    strange = [host.data_ptr(), other.data_ptr(), own.data_ptr() + 16, 1]
    assert gpu.memories_at(own.device, strange) == [None] * 4


@pytest.mark.parametrize("waits", [False, True])
def test_reads_and_writes_of_kernels_are_followed(gpu: Simulation, waits: bool) -> None:
    x, y = torch.zeros(16, device="cuda"), torch.zeros(16, device="cuda")
    add(x, y)
    side = torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        add(y, x)
    # What it reads was written, and what it overwrites was read and had been written.
    assert gpu.kinds == ([] if waits else ["race"] * 3)
