"""Where tensors of a simulated GPU lie, what refuses to mix them, and where the host waits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from ..simulated_gpu.device import Simulation, SimulationError, to_device

pytest.importorskip("triton")

CUDA = torch.device("cuda", 0)


def test_tensors_lie_where_they_were_made_or_moved(gpu: Simulation) -> None:
    x = torch.arange(6.0, device="cuda")
    for result in (
        x + 1, x.view(2, 3), x[2:], torch.zeros_like(x), x.new_ones(3), x.clone(), x.long(),
        torch.tensor([1.0], device="cuda"), torch.ones(3).to("cuda"), torch.ones(3).cuda(),
        torch.ones(3).to(x), torch.cat([x, x]), torch.full((2,), 3, device=x.device),
    ):  # fmt: skip
        assert result.device == CUDA and result.is_cuda and not result.is_cpu
    for result in (x.cpu(), x.to("cpu"), torch.ones(3), torch.zeros_like(x, device="cpu")):
        assert result.device == torch.device("cpu") and result.is_cpu
    assert torch.ones(2, device="cuda:1").device.index == 1
    assert (x.cpu() == torch.arange(6.0)).all()
    assert not gpu.findings


def test_the_current_device_is_that_of_the_thread(gpu: Simulation) -> None:
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device.index == 1
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream().device.index == 1
    assert torch.ones(1, device="cuda").device.index == 0
    assert torch.cuda.device_count() == 2


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(4),
        lambda x: torch.cat([x, torch.ones(4)]),
        lambda x: x.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: x + x.to("cuda:1"),
        lambda x: torch.where(torch.ones(4, dtype=torch.bool), x, x),
    ],
    ids=["add", "cat", "mask", "select", "two devices", "where"],
)
def test_devices_are_not_mixed(gpu: Simulation, mix: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(SimulationError, match="on the same device"):
        mix(x)
    assert gpu.kinds == ["device"]


def test_numbers_of_the_host_go_along(gpu: Simulation) -> None:
    x = torch.ones(4, device="cuda")
    for result in (x + 1, x * torch.tensor(2.0), x.masked_fill(x > 0, 3.0), x.clamp(min=0)):
        assert result.is_cuda
    x[1:2] = 5.0
    x[2] = torch.tensor(4.0)
    assert x.tolist() == [1.0, 5.0, 4.0, 1.0]
    assert not gpu.findings


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.ones(4).to(x),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 1], device="cuda")),
        lambda x: torch.nn.functional.one_hot(x.long()),
        lambda x: torch.linalg.solve(torch.eye(4, device="cuda"), x),
        lambda x: torch.cuda.synchronize(),
        repr,
        "{}".format,
        "{!r:.3}".format,
    ],
    ids=[
        "item", "bool", "tolist", "cpu", "to", "nonzero", "mask", "unique", "equal", "allclose",
        "tensor", "from the host", "index of the host", "repeats", "one_hot", "solve",
        "synchronize", "repr", "format", "cut",
    ],
)  # fmt: skip
def test_what_makes_the_host_wait_is_told_with_its_phase_and_place(
    gpu: Simulation,
    call: Callable[[torch.Tensor], Any],
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    with mode():
        x = torch.ones(4, device="cuda")
        assert not gpu.waits
        gpu.phase = "decode"
        call(x)
        assert gpu.waits_in("decode")
        assert all("test_operations.py:" in wait.site for wait in gpu.waits)
        assert not gpu.waits_in("prompt")


def test_a_printed_tensor_says_where_it_lies(gpu: Simulation) -> None:
    x = torch.ones(2, device="cuda")
    assert repr(x) == str(x) == f"{x}" == "tensor([1., 1.], device='cuda:0')"
    assert "device='cuda:1')" in repr(torch.nn.Parameter(torch.ones(2, device="cuda:1")))
    assert f"{x.sum():.2f}" == "2.00"
    before = gpu.waits.total()
    assert repr(torch.ones(0, device="cuda")) == "tensor([], device='cuda:0')"
    assert repr(torch.ones(2)) == "tensor([1., 1.])"
    assert gpu.waits.total() == before


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


def test_a_model_can_be_put_on_a_device(gpu: Simulation) -> None:
    model = to_device(torch.nn.Linear(4, 2), "cuda:1")
    with torch.inference_mode():
        assert model(torch.ones(1, 4, device="cuda:1")).device.index == 1
        with pytest.raises(SimulationError):
            model(torch.ones(1, 4, device="cuda:0"))


def test_numpy_is_refused_as_by_torch(gpu: Simulation) -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        torch.ones(2, device="cuda").numpy()
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        np.asarray(torch.ones(2, device="cuda"))
    assert torch.ones(2).numpy().sum() == np.asarray(torch.ones(2)).sum() == 2


def test_copies_of_objects_stay_on_their_device(gpu: Simulation) -> None:
    module = to_device(torch.nn.Linear(2, 2), "cuda:1")
    twin = copy.deepcopy(module)
    assert twin.weight.device.index == 1 and isinstance(twin.weight, torch.nn.Parameter)
    assert copy.deepcopy(torch.ones(2, device="cuda")).is_cuda
    assert copy.deepcopy(torch.ones(2)).is_cpu


def test_devices_that_are_not_there_are_refused(gpu: Simulation) -> None:
    for call in (
        lambda: torch.ones(2, device="cuda:2"),
        lambda: torch.ones(2).to("cuda:2"),
        lambda: torch.cuda.set_device(2),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            call()


def test_waits_raise_where_torch_was_told_to(gpu: Simulation) -> None:
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        torch.ones(2, device="cuda").tolist()
