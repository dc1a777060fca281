"""Clocks of a simulated GPU: what is not waited for is found, what is waited for is not."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from hf_kvret.replay import recorders
from hf_kvret.stores.memory import HostMemory

from ..simulated_gpu.device import Simulation, SimulationError, simulated
from .test_launches import add

pytest.importorskip("triton")


def test_work_of_one_stream_is_in_order(gpu: Simulation) -> None:
    x = torch.ones(4, device="cuda")
    y = (x + 1).mul_(2)
    y.copy_(x)
    assert not gpu.findings
    assert not gpu.waits


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_reads_what_another_wrote_has_to_wait(gpu: Simulation, waits: bool) -> None:
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    assert gpu.kinds == ([] if waits else ["race"])
    if not waits:
        assert "test_streams.py:" in next(iter(gpu.findings)).site


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_overwrites_what_another_reads_has_to_wait(
    gpu: Simulation, waits: bool
) -> None:
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
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


@pytest.mark.parametrize("tells", [False, True])
def test_memory_that_another_stream_uses_is_not_handed_out_again(
    gpu: Simulation, tells: bool
) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if tells:
        x.record_stream(side)
    del x
    torch.ones(4, device="cuda")
    assert gpu.kinds == ([] if tells else ["freed"])


def test_memory_may_be_freed_once_its_stream_has_waited(gpu: Simulation) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    torch.cuda.current_stream().wait_stream(side)
    del x
    torch.ones(4, device="cuda")
    assert not gpu.findings


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


def test_a_worker_thread_goes_on_after_what_submitted_it(gpu: Simulation) -> None:
    target = torch.empty(4, pin_memory=True)
    with ThreadPoolExecutor(1) as pool:
        target.copy_(torch.ones(4, device="cuda"), non_blocking=True)
        event = torch.cuda.current_stream().record_event()

        def turn() -> float:
            event.synchronize()
            return float(target.add_(1.0).sum())

        assert pool.submit(turn).result() == 8.0
        target.zero_()
        assert not gpu.findings
        pool.submit(target.zero_)
        target.zero_()
    assert "race" in gpu.kinds


def test_a_capture_does_its_work_at_each_replay(gpu: Simulation) -> None:
    x, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin()
        total.add_(x)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    graph.replay()
    assert not gpu.findings
    # A replay reads and writes what the capture did.
    with torch.cuda.stream(torch.cuda.Stream()):
        total.sum()
    assert gpu.kinds == ["race"]
    assert total.tolist() == [2.0] * 4


@pytest.mark.parametrize("how", ["kept", "freed", "replaced", "freed at once"])
@pytest.mark.parametrize("kind", ["tensor", "view", "written", "kernel", "pinned"])
def test_what_a_graph_reads_has_to_stay(gpu: Simulation, kind: str, how: str) -> None:
    x, total = torch.arange(16.0, device="cuda"), torch.zeros(16, device="cuda")
    if kind == "pinned":
        x = torch.arange(16.0).pin_memory()
    graph, side, kept = torch.cuda.CUDAGraph(), torch.cuda.Stream(), [x]
    add(total.clone(), total)
    total.zero_()
    side.wait_stream(torch.cuda.current_stream())

    def step() -> torch.Tensor:
        x = kept.pop() if how == "freed at once" else kept[0]
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
        return (total + 1).view(4, 4)

    del x
    with torch.cuda.stream(side):
        graph.capture_begin()
        out = step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    assert total.sum().item() == 0
    if how in ("freed", "replaced"):
        old = kept.pop()
        if how == "replaced":
            kept.append(old.clone())
        del old
    if how == "kept":
        for number in (7.0, 8.0):
            kept[0][:] = number
            graph.replay()
            expected = number + (kind == "kernel")
            assert total.tolist() == [expected] * 16 and out[3, 3].item() == expected + 1
        assert not gpu.findings
    else:
        with pytest.raises(SimulationError, match="a replay uses memory that was freed"):
            graph.replay()
        (finding,) = gpu.findings
        assert finding.kind == "stale" and "test_streams.py:" in finding.text


def test_numbers_of_the_host_go_into_a_graph(gpu: Simulation) -> None:
    total, number = torch.zeros(4, device="cuda"), torch.tensor(3.0)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin()
        total.add_(number)
        graph.capture_end()
        del number
        graph.replay()
    side.synchronize()
    assert total.tolist() == [3.0] * 4
    assert not gpu.findings


def test_a_graph_of_a_pool_is_stale_with_the_graph_whose_memory_it_reads(gpu: Simulation) -> None:
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    with torch.cuda.stream(torch.cuda.Stream()):
        graphs[0].capture_begin()
        tensor = torch.ones(4, device="cuda")
        graphs[0].capture_end()
        graphs[1].capture_begin()
        total = tensor + 1
        graphs[1].capture_end()
        del tensor
        graphs[0].replay()
        graphs[1].replay()
        assert total.tolist() == [2.0] * 4
        graphs[0].reset()
        with pytest.raises(SimulationError, match="a replay uses memory that was freed"):
            graphs[1].replay()


def test_captures_refuse_what_a_gpu_refuses(gpu: Simulation) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    outside = torch.cuda.current_stream().record_event()
    with torch.cuda.stream(side):
        for refused in (
            x.tolist,
            lambda: x.sum().item(),
            lambda: repr(x),
            side.synchronize,
            lambda: side.wait_event(outside),
            lambda: torch.cuda.cudart().cudaHostRegister(0, 4096, 0),
        ):
            graph.capture_begin()
            with pytest.raises(RuntimeError, match=r"CUDA error|reads a number"):
                refused()
            with pytest.raises(RuntimeError, match="error during capture"):
                graph.capture_end()
    assert not torch.cuda.is_current_stream_capturing()


def test_only_a_capture_that_ended_well_is_replayed(gpu: Simulation) -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        torch.ones(2, device="cuda").add_(1)
        graph.capture_end()
    graph.replay()
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


@pytest.mark.parametrize("waits", [False, True])
def test_memory_stays_pinned_while_it_is_copied(gpu: Simulation, waits: bool) -> None:
    rows, side = torch.zeros(8), torch.cuda.Stream()
    ones = torch.ones(8, device="cuda")
    runtime = torch.cuda.cudart()
    runtime.cudaHostRegister(rows.data_ptr(), rows.nbytes, 0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rows.copy_(ones, non_blocking=True)
    if waits:
        side.synchronize()
    runtime.cudaHostUnregister(rows.data_ptr())
    assert gpu.kinds == ([] if waits else ["freed"])


def test_a_worker_that_fails_is_waited_for_all_the_same(gpu: Simulation) -> None:
    target = torch.zeros(4)

    def turn() -> None:
        target.add_(1.0)
        raise KeyError("broken")

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyError, match="broken"):
            pool.submit(turn).result()
        target.add_(1.0)
        assert isinstance(pool.submit(turn).exception(), KeyError)
        target.add_(1.0)
    assert not gpu.findings


def test_nothing_is_left_behind() -> None:
    before = dict(vars(torch.cuda)), torch.Tensor.record_stream, ThreadPoolExecutor.submit
    with pytest.raises(KeyError), simulated():
        assert torch.cuda.is_available()
        raise KeyError
    assert before == (
        dict(vars(torch.cuda)),
        torch.Tensor.record_stream,
        ThreadPoolExecutor.submit,
    )
    assert torch.ones(1).device.type == "cpu"


def test_what_outlives_it_is_freed_in_silence() -> None:
    with simulated():
        rows = HostMemory(torch.device("cuda", 0)).allocate((4, 4), torch.float32)
        assert rows.is_pinned()
    del rows
    with simulated() as gpu:
        rows = HostMemory(torch.device("cuda", 0)).allocate((4, 4), torch.float32)
        assert len(gpu.registered) == 1
        del rows
        assert not gpu.registered


def test_one_at_a_time(gpu: Simulation) -> None:
    with pytest.raises(RuntimeError, match="entered already"), simulated():
        pass


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


def test_recorders_at_work_have_streams_of_their_own(
    gpu: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
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
