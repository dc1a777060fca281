"""Pinned chunks that come and go while a CUDA graph is captured, here or in another thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_kvret.stores import pinning
from hf_kvret.stores.memory import HostMemory

from ..simulated_gpu.device import Simulation, simulated

pytest.importorskip("triton")

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    with simulated() as simulation, torch.no_grad():
        yield simulation


@pytest.mark.parametrize("mode", ["thread_local", "global"])
@pytest.mark.parametrize("relaxes", [True, False])
def test_registering_breaks_no_capture_of_another_thread(
    gpu: Simulation, monkeypatch: pytest.MonkeyPatch, mode: str, relaxes: bool
) -> None:
    if not relaxes:
        monkeypatch.setattr(pinning, "_beside_captures", nullcontext)
    memory, graph, x = HostMemory(GPU), torch.cuda.CUDAGraph(), torch.ones(2, device="cuda")
    with ThreadPoolExecutor(1) as pool, torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode=mode)
        pending = pool.submit(memory.allocate, (3, 4), torch.float32)
        if mode == "global" and not relaxes:
            with pytest.raises(RuntimeError, match=r"not permitted|error during capture"):
                pending.result()
            with pytest.raises(RuntimeError, match="error during capture"):
                graph.capture_end()
            return
        assert pending.result().is_pinned()
        x.add_(1)
        graph.capture_end()


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_no_chunk_that_comes_or_goes_breaks_the_capture_of_another_thread(
    gpu: Simulation, mode: str
) -> None:
    memory = HostMemory(GPU)
    old = [memory.allocate((3, 4), torch.float32)]
    graph, x = torch.cuda.CUDAGraph(), torch.ones(2, device="cuda")

    def turn() -> torch.Tensor:
        memory.write(old[0], torch.ones(3, 4, device="cuda"))
        old.pop()
        return memory.allocate((5, 4), torch.float32)

    with ThreadPoolExecutor(1) as pool, torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode=mode)
        new = pool.submit(turn).result()
        x.add_(1)
        graph.capture_end()
    assert new.is_pinned() and len(gpu.registered) == 1
    assert not gpu.findings


def test_a_capture_makes_no_chunk_of_its_own(gpu: Simulation) -> None:
    memory, graph = HostMemory(GPU), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            memory.allocate((3, 4), torch.float32)
        with pytest.raises(RuntimeError, match="error during capture"):
            graph.capture_end()


def test_a_thread_is_relaxed_only_while_it_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]

    def exchange(pointer: Any) -> int:
        modes.append(pointer._obj.value)
        pointer._obj.value = modes[-2]
        return 0

    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(pinning, "_driver", lambda: driver)
    with pytest.raises(KeyError), pinning._beside_captures():
        assert modes == [0, 2]
        raise KeyError
    assert modes == [0, 2, 0]
