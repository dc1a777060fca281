"""Pinned chunks: how many and of what size, and how they come and go beside captures."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.contracts import host_memory
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import HostMemory, PageMemory

from ..simulated_gpu.device import Runtime, simulated
from ..simulated_gpu.simulation import Simulation

pytest.importorskip("triton")

GPU = torch.device("cuda", 0)
HEADS, DIM, PAGE_LEN = 2, 4, 4
PAGE_BYTES = HEADS * PAGE_LEN * 2 * DIM * 4


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    with simulated() as simulation, torch.no_grad():
        yield simulation


@pytest.fixture
def log(gpu: Simulation, watch: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages of each registration."""
    # Whole memory pages and pages of rows are the same here.
    monkeypatch.setattr(host_memory, "MEMORY_PAGE", PAGE_BYTES)
    return watch(Runtime, "cudaHostRegister", lambda self, _, size, __: size // PAGE_BYTES)


def block(start: int, count: int) -> TokenBlock:
    elements = torch.arange(start, start + count, dtype=torch.float32, device="cuda")
    keys = elements[:, None].expand(1, HEADS, count, DIM).contiguous()
    return TokenBlock(keys, -keys, start)


def store_of(memory: PageMemory, expected: int = 0) -> PagedStore:
    store = PagedStore(memory, PAGE_LEN)
    store.expect(expected)
    return store


def check(store: PagedStore, length: int) -> None:
    assert len(store) == length
    keys = torch.cat([keys for _, keys, _ in store.chunks()], dim=2)
    assert keys[0, 0, :, 0].cpu().tolist() == list(range(length))


def test_a_prompt_in_chunks_is_pinned_once(gpu: Simulation, log: list[int]) -> None:
    store = store_of(HostMemory(GPU), 90)
    for start in range(0, 90, 10):
        store.append(block(start, 10))
    check(store, 90)
    assert log == [23]
    assert store.host_nbytes() == 23 * PAGE_BYTES
    assert not gpu.findings


def test_large_chunks_are_registered_to_the_end_of_a_huge_page(
    gpu: Simulation, log: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "LEAST_HUGE", 20 * PAGE_BYTES)
    monkeypatch.setattr(host_memory, "HUGE_PAGE", 16 * PAGE_BYTES)
    stores = [store_of(HostMemory(GPU)) for _ in range(3)]
    for store, tokens in zip(stores, (76, 84, 128), strict=True):
        store.append(block(0, tokens))
        check(store, tokens)
    assert log == [19, 32, 32]


@pytest.mark.parametrize(("how", "left"), [("drop", 0), ("reset", 0), ("fork", 2)])
def test_a_chunk_is_unpinned_when_nobody_holds_it(gpu: Simulation, how: str, left: int) -> None:
    store = store_of(HostMemory(GPU))
    store.append(block(0, 10))
    assert len(gpu.registered) == 1
    if how == "reset":
        store.reset()
    elif how == "fork":
        twin = store.fork()
        del store
        twin.append(block(10, 10))
    else:
        del store
    assert len(gpu.registered) == left
    assert not gpu.findings


def test_failed_pinning_changes_nothing(gpu: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(HostMemory(GPU))
    store.append(block(0, 10))
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "cudaHostRegister", lambda *args: 2)
        with pytest.raises(MemoryError, match="ulimit -l"):
            store.append(block(10, 10))
    check(store, 10)
    store.append(block(10, 10))
    check(store, 20)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no child processes like this here")
def test_a_child_process_does_not_unpin(gpu: Simulation) -> None:
    chunk = HostMemory(GPU).allocate((3, 4), torch.float32)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        before = len(gpu.registered)
        del chunk
        os._exit(before - len(gpu.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_chunk_that_comes_or_goes_breaks_the_capture_of_another_thread(gpu: Simulation) -> None:
    memory = HostMemory(GPU)
    old = [memory.allocate((3, 4), torch.float32)]
    graph, x = torch.cuda.CUDAGraph(), torch.ones(2, device="cuda")

    def turn() -> torch.Tensor:
        memory.write(old[0], torch.ones(3, 4, device="cuda"))
        old.pop()
        return memory.allocate((5, 4), torch.float32)

    with ThreadPoolExecutor(1) as pool, torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        new = pool.submit(turn).result()
        x.add_(1)
        graph.capture_end()
    assert new.is_pinned() and len(gpu.registered) == 1
    assert not gpu.findings
