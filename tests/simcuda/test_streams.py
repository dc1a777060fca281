"""Clocks of a simulated GPU: what is not waited for is found, what is waited for is not."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hf_kvret.replay import recorders

from ..simulated_gpu.device import simulated
from ..simulated_gpu.simulation import Simulation, SimulationError
from .test_launches import add

pytest.importorskip("triton")


@contextmanager
def aside() -> Iterator[torch.cuda.Stream]:
    """On another stream, after all of the current one's work."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield side


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of ``step``, which later work of the current stream comes after."""
    graph = torch.cuda.CUDAGraph()
    with aside() as side:
        graph.capture_begin()
        step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_reads_what_another_wrote_has_to_wait(gpu: Simulation, waits: bool) -> None:
    x = torch.ones(4, device="cuda")
    with aside() if waits else torch.cuda.stream(torch.cuda.Stream()):
        x.sum()
    assert gpu.kinds == ([] if waits else ["race"])
    assert all("test_streams.py:" in finding.site for finding in gpu.findings)


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_overwrites_what_is_read_has_to_wait(gpu: Simulation, waits: bool) -> None:
    x = torch.ones(4, device="cuda")
    with aside() as side:
        x.sum()
        event = side.record_event()
    if waits:
        torch.cuda.current_stream().wait_event(event)
    x.zero_()
    assert gpu.kinds == ([] if waits else ["race"])


def test_an_event_orders_only_what_came_before_it(gpu: Simulation) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    event = torch.cuda.current_stream().record_event()
    x.zero_()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.sum()
    assert gpu.kinds == ["race"]


@pytest.mark.parametrize("how", ["neither", "told", "waited"])
def test_memory_that_another_stream_uses_is_not_handed_out_again(gpu: Simulation, how: str) -> None:
    x = torch.ones(4, device="cuda")
    with aside() as side:
        x.sum()
    if how == "told":
        x.record_stream(side)
    if how == "waited":
        torch.cuda.current_stream().wait_stream(side)
    del x
    torch.ones(4, device="cuda")
    assert gpu.kinds == (["freed"] if how == "neither" else [])


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_reads_pinned_memory_after_the_copy(gpu: Simulation, waits: bool) -> None:
    target = torch.empty(4, pin_memory=True)
    target.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    if waits:
        event.synchronize()
    assert target.tolist() == [1.0] * 4
    assert gpu.kinds == ([] if waits else ["race"])
    assert len(gpu.waits) == waits


@pytest.mark.parametrize("waits", [False, True])
def test_memory_stays_pinned_while_it_is_copied(gpu: Simulation, waits: bool) -> None:
    rows, ones = torch.zeros(8), torch.ones(8, device="cuda")
    runtime = torch.cuda.cudart()
    runtime.cudaHostRegister(rows.data_ptr(), rows.nbytes, 0)
    with aside() as side:
        rows.copy_(ones, non_blocking=True)
    if waits:
        side.synchronize()
    runtime.cudaHostUnregister(rows.data_ptr())
    assert gpu.kinds == ([] if waits else ["freed"])


def test_a_worker_thread_goes_on_after_what_submitted_it(gpu: Simulation) -> None:
    target = torch.empty(4, pin_memory=True)
    with ThreadPoolExecutor(1) as pool:
        target.copy_(torch.ones(4, device="cuda"), non_blocking=True)
        event = torch.cuda.current_stream().record_event()

        def turn() -> None:
            event.synchronize()
            target.add_(1.0)
            raise KeyError("broken")

        assert isinstance(pool.submit(turn).exception(), KeyError)
        assert target.tolist() == [2.0] * 4
        assert not gpu.findings
        pool.submit(target.zero_)
        target.zero_()
    assert "race" in gpu.kinds


def test_a_capture_does_its_work_at_each_replay(gpu: Simulation) -> None:
    x, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    numbers = [torch.tensor(3.0)]
    graph = captured(lambda: total.add_(x * numbers[0]))
    # A number of the host has gone into the graph.
    numbers.clear()
    graph.replay()
    graph.replay()
    assert not gpu.findings
    # A replay reads and writes what the capture did.
    with torch.cuda.stream(torch.cuda.Stream()):
        total.sum()
    assert gpu.kinds == ["race"]
    assert total.tolist() == [6.0] * 4


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "view", "written", "kernel", "pinned"])
def test_what_a_graph_reads_has_to_stay(gpu: Simulation, kind: str, is_kept: bool) -> None:
    x, total = torch.arange(16.0, device="cuda"), torch.zeros(16, device="cuda")
    if kind == "pinned":
        x = torch.arange(16.0).pin_memory()
    kept, out = [x], []
    # Compiled before the capture.
    add(total.clone(), total)

    def step() -> None:
        x = kept[0]
        if kind == "kernel":
            add(x, total)
        elif kind == "written":
            x.add_(0)
            total.copy_(x)
        elif kind == "pinned":
            total.copy_(x, non_blocking=True)
        else:
            total.copy_(x if kind == "tensor" else x.view(4, 4)[:].view(-1))
        # What the graph has made itself stays with it.
        out.append((total + 1).view(4, 4))

    del x
    graph = captured(step)
    assert total.tolist() == [1.0] * 16, "a capture does nothing"
    if is_kept:
        for number in (7.0, 8.0):
            kept[0][:] = number
            graph.replay()
            expected = number + (kind == "kernel")
            assert total.tolist() == [expected] * 16 and out[0][3, 3].item() == expected + 1
        assert not gpu.findings
        return
    kept.clear()
    with pytest.raises(SimulationError, match="a replay uses memory that was freed"):
        graph.replay()
    (finding,) = gpu.findings
    assert finding.kind == "stale" and "test_streams.py:" in finding.text


def test_a_graph_of_a_pool_is_stale_with_the_graph_whose_memory_it_reads(gpu: Simulation) -> None:
    made: list[torch.Tensor] = []
    first = captured(lambda: made.append(torch.ones(4, device="cuda")))
    second = captured(lambda: made.append(made.pop() + 1))
    first.replay()
    second.replay()
    assert made[0].tolist() == [2.0] * 4
    first.reset()
    with pytest.raises(SimulationError, match="a replay uses memory that was freed"):
        second.replay()


def test_captures_refuse_what_a_gpu_refuses(gpu: Simulation) -> None:
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    outside = torch.cuda.current_stream().record_event()
    with aside() as side:
        for refused in (
            x.tolist,
            lambda: x.sum().item(),
            side.synchronize,
            lambda: side.wait_event(outside),
            lambda: torch.cuda.cudart().cudaHostRegister(0, 4096, 0),
        ):
            graph.capture_begin()
            with pytest.raises(RuntimeError, match=r"CUDA error|reads a number"):
                refused()
            with pytest.raises(RuntimeError, match="error during capture"):
                graph.capture_end()
            with pytest.raises(RuntimeError, match="without a preceding successful capture"):
                graph.replay()
    assert not torch.cuda.is_current_stream_capturing()


def test_nothing_is_left_behind() -> None:
    before = dict(vars(torch.cuda)), torch.Tensor.record_stream, ThreadPoolExecutor.submit
    with pytest.raises(KeyError), simulated():
        assert torch.cuda.is_available()
        raise KeyError
    after = dict(vars(torch.cuda)), torch.Tensor.record_stream, ThreadPoolExecutor.submit
    assert before == after
    assert torch.ones(1).device.type == "cpu"


@pytest.mark.parametrize("shared", [False, True])
def test_a_graph_outlives_those_of_other_recorders(
    gpu: Simulation, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    device, x = torch.device("cuda", 0), torch.ones(4, device="cuda")
    if shared:
        stream = torch.cuda.Stream()
        monkeypatch.setattr(recorders, "_take_stream", lambda device: stream)
    first = recorders.CudaRecorder(device)
    first.record(lambda: x + 1)
    out, replay = first.record(lambda: x + 2)
    for _ in range(2):
        # The next one may have the stream of the one that is gone.
        recorders.CudaRecorder(device).record(lambda: x + 3)
    replay()
    assert gpu.kinds == (["stale"] if shared else [])
    assert out.tolist() == [3.0] * 4


def test_recorders_have_their_own_streams(gpu: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out 32 streams in turn, also to stores."""
    device, pool = torch.device("cuda", 0), itertools.cycle(range(32))

    def hand_out(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(device=device, cuda_stream=next(pool))

    monkeypatch.setattr(torch.cuda, "Stream", hand_out)
    at_work = [recorders.CudaRecorder(device) for _ in range(20)]
    for _ in range(40):
        hand_out(device)
        recorders.CudaRecorder(device)
    at_work += [recorders.CudaRecorder(device) for _ in range(12)]
    assert len({one._stream.cuda_stream for one in at_work}) == 32
    with pytest.raises(RuntimeError, match="delete a DecodeGraph"):
        recorders.CudaRecorder(device)
    del at_work[0]
    recorders.CudaRecorder(device)
