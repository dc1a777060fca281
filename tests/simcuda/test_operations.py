"""Where tensors of a simulated GPU lie, what refuses to mix them, and where the host waits."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ..simulated_gpu.device import to_device
from ..simulated_gpu.simulation import Simulation, SimulationError

pytest.importorskip("triton")


def test_tensors_lie_where_they_were_made_or_moved(gpu: Simulation) -> None:
    x = torch.arange(6.0, device="cuda")
    module = to_device(torch.nn.Linear(6, 2), "cuda:0")
    with torch.inference_mode():
        on_device = [
            *(x + 1, x.view(2, 3), x[2:], torch.zeros_like(x), x.new_ones(3), x.clone(), x.long()),
            *(torch.tensor([1.0], device="cuda"), torch.ones(3).to("cuda"), torch.ones(3).cuda()),
            *(torch.ones(3).to(x), torch.cat([x, x]), torch.full((2,), 3, device=x.device)),
            *(module(x), copy.deepcopy(module).weight, copy.deepcopy(x)),
        ]
    for result in on_device:
        assert result.device == torch.device("cuda", 0) and result.is_cuda and not result.is_cpu
    for result in (x.cpu(), x.to("cpu"), torch.ones(3), torch.zeros_like(x, device="cpu")):
        assert result.device == torch.device("cpu") and result.is_cpu
    assert (x.cpu() == torch.arange(6.0)).all()
    assert not gpu.findings


def test_the_current_device_is_that_of_the_thread(gpu: Simulation) -> None:
    assert torch.cuda.device_count() == 2
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device.index == torch.cuda.current_device() == 1
        assert torch.cuda.current_stream().device.index == 1
    assert torch.ones(1, device="cuda").device.index == 0
    for call in (
        lambda: torch.ones(2, device="cuda:2"),
        lambda: torch.ones(2).to("cuda:2"),
        lambda: torch.cuda.set_device(2),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            call()


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(4),
        lambda x: torch.cat([x, torch.ones(4)]),
        lambda x: x.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: x + x.to("cuda:1"),
    ],
    ids=["add", "cat", "mask", "select", "two devices"],
)
def test_devices_are_not_mixed(gpu: Simulation, mix: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(SimulationError, match="on the same device"):
        mix(x)
    assert gpu.kinds == ["device"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.ones(4).to(x),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.linalg.solve(torch.eye(4, device="cuda"), x),
        lambda x: torch.cuda.synchronize(),
        repr,
        "{}".format,
    ],
    ids=[
        *("item", "tolist", "to", "nonzero", "mask", "tensor", "from the host"),
        *("index of the host", "solve", "synchronize", "repr", "format"),
    ],
)
def test_waits_have_phase_and_place(gpu: Simulation, call: Callable[[torch.Tensor], Any]) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        gpu.waits.clear()
        with mode():
            x = torch.ones(4, device="cuda")
            assert not gpu.waits
            gpu.phase = "decode"
            call(x)
        assert gpu.waits_in("decode") and not gpu.waits_in("prompt")
        assert all("test_operations.py:" in wait.site for wait in gpu.waits)


def test_what_does_not_wait_is_not_told(gpu: Simulation) -> None:
    x, pinned = torch.ones(4, device="cuda"), torch.ones(4).pin_memory()
    assert pinned.is_pinned() and not torch.ones(4).is_pinned()
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    x.masked_fill_(x > 0, 2.0)
    x.index_add_(0, torch.arange(4, device="cuda"), x.clone())
    x.repeat_interleave(torch.ones(4, dtype=torch.long, device="cuda"), output_size=4)
    torch.histc(x, 2, 0, 4)
    assert x.topk(2).values.is_cuda
    assert not gpu.waits
    assert not gpu.findings


def test_copies_that_are_not_what_they_seem_are_found(gpu: Simulation) -> None:
    x, pinned = torch.ones(4, 4, device="cuda"), torch.ones(4, 4).pin_memory()
    x.copy_(torch.ones(4, 4), non_blocking=True)
    x.T.copy_(pinned, non_blocking=True)
    assert gpu.kinds == ["copy", "copy"]


def test_numpy_is_refused_as_by_torch(gpu: Simulation) -> None:
    for call in (torch.Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            call(torch.ones(2, device="cuda"))
        assert call(torch.ones(2)).sum() == 2
