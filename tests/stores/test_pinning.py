"""Pinned chunks that a background thread makes: when, how many, and what becomes of them."""

from __future__ import annotations

import copy
import ctypes
import gc
import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.stores import PagedStore, pinning
from hf_kvret.stores.host_memory import mapped, populate
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory, SplitMemory
from hf_kvret.stores.pinning import Chunk, LayerChunks, PendingChunk

from ..simulated_gpu.device import Simulation, simulated
from ..simulated_gpu.driver import Runtime

pytest.importorskip("triton")

GPU = torch.device("cuda", 0)
HEADS, DIM, PAGE_LEN = 2, 4, 4
PAGE_BYTES = HEADS * PAGE_LEN * 2 * DIM * 4
FORM = Chunk((3, HEADS, PAGE_LEN, 2 * DIM), torch.float32, GPU)


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    with simulated() as simulation, torch.no_grad():
        yield simulation


@pytest.fixture
def log(gpu: Simulation, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Pages of each registration, and whether the background thread made it."""
    made: list[tuple[int, bool]] = []
    register = Runtime.cudaHostRegister

    def noted(self: Runtime, address: int, size: int, flags: int) -> int:
        background = threading.current_thread() is not threading.main_thread()
        made.append((size // PAGE_BYTES, background))
        return register(self, address, size, flags)

    # Whole memory pages and pages of rows are the same here.
    monkeypatch.setattr(pinning, "_MEMORY_PAGE", PAGE_BYTES)
    monkeypatch.setattr(Runtime, "cudaHostRegister", noted)
    return made


class Gate:
    """Stops the background thread where it populates memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

        def wait(raw: torch.Tensor) -> None:
            self.reached.set()
            assert self.opened.wait(30)

        monkeypatch.setattr(pinning, "populate", wait)

    def open(self) -> None:
        self.opened.set()
        settle()


def settle() -> None:
    """Wait until the background thread has done all that it was given."""
    pinning._worker.submit(int).result()


def block(start: int, count: int, batch: int = 1) -> TokenBlock:
    numbers = torch.arange(start, start + count, dtype=torch.float32, device="cuda")
    keys = numbers[:, None].expand(batch, HEADS, count, DIM).contiguous()
    return TokenBlock(keys, -keys, start)


def store_of(memory: PageMemory, *expected: int) -> PagedStore:
    store = PagedStore(memory, PAGE_LEN)
    if expected:
        store.expect(*expected)
    return store


def check(store: PagedStore, length: int) -> None:
    assert len(store) == length
    keys = torch.cat([keys for _, keys, _ in store.chunks()], dim=2)
    assert keys[0, 0, :, 0].cpu().tolist() == list(range(length))


def test_other_layers_chunks_are_made_while_the_first_is_used(
    gpu: Simulation, log: list[tuple[int, bool]]
) -> None:
    layers = LayerChunks(3)
    stores = [store_of(HostMemory(GPU, layers=layers)) for _ in range(3)]
    for store in stores:
        store.append(block(0, 10))
        settle()
    assert log == [(3, False), (3, True), (3, True)]
    layers.begin_pass()
    # The next pass brings more than the chunks have room for.
    for store in stores:
        store.append(block(10, 4))
        settle()
        check(store, 14)
    assert log[3:] == [(1, False), (1, True), (1, True)]
    assert not gpu.findings


def test_layers_of_other_forms_get_what_they_ask_for(
    gpu: Simulation, log: list[tuple[int, bool]]
) -> None:
    layers = LayerChunks(4)
    for count in (10, 6, 10, 10):
        store = store_of(HostMemory(GPU, layers=layers))
        store.append(block(0, count))
        settle()
        check(store, count)
    # The last two are made when they are asked for: it is not known who asks next.
    assert [pages for pages, background in log if not background] == [3, 2, 3, 3]


def test_what_no_layer_asks_for_in_a_pass_is_given_back(gpu: Simulation) -> None:
    layers = LayerChunks(3)
    store = store_of(HostMemory(GPU, layers=layers))
    store.append(block(0, 10))
    settle()
    assert len(gpu.registered) == 3
    layers.begin_pass()
    assert len(gpu.registered) == 1
    twin = pickle.loads(pickle.dumps(layers))
    assert isinstance(twin, LayerChunks) and twin._layers == 3


def test_a_prompt_in_chunks_finds_its_room_made(
    gpu: Simulation, log: list[tuple[int, bool]]
) -> None:
    """Chunks double; the last one has what is left, so that there is never more than announced."""
    store = store_of(HostMemory(GPU), 90, 90)
    for start in range(0, 90, 10):
        store.append(block(start, min(10, 90 - start)))
        settle()
        assert store.nbytes() - 4 * store._page_count <= 23 * PAGE_BYTES
    check(store, 90)
    assert log == [(3, False), (3, True), (6, True), (11, True)]
    assert not gpu.findings


def test_room_for_generated_tokens_is_made_an_eighth_at_a_time(
    gpu: Simulation, log: list[tuple[int, bool]]
) -> None:
    store = store_of(HostMemory(GPU), 0, 64 + 20)
    store.append(block(0, 64))
    for start in range(64, 96, 4):
        settle()
        store.append(block(start, 4))
    settle()
    check(store, 96)
    # 21 pages were announced; what comes nevertheless is made when it comes.
    assert log == [(16, False), (2, True), (3, True), (2, False), (2, False)]


def test_a_split_store_prepares_what_its_device_has_no_room_for(
    gpu: Simulation, log: list[tuple[int, bool]]
) -> None:
    store = store_of(SplitMemory(GPU, 5 * PAGE_BYTES), 90, 90)
    for start in range(0, 90, 10):
        store.append(block(start, min(10, 90 - start)))
        settle()
    check(store, 90)
    assert log == [(5, True), (10, True), (3, True)]
    assert store.host_nbytes() == 18 * PAGE_BYTES


def test_memory_that_is_not_pinned_is_made_at_once() -> None:
    for memory in (HostMemory(torch.device("cpu")), DeviceMemory(torch.device("cpu"))):
        assert not memory.prepares(1)


def test_a_chunk_that_is_not_begun_is_made_by_who_takes_it(
    log: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, stream = Gate(monkeypatch), torch.cuda.Stream(GPU)
    first, second = PendingChunk(FORM), PendingChunk(FORM)
    assert gate.reached.wait(30)
    assert second.take(stream).shape == FORM.shape
    assert log == [(3, False)]
    threading.Timer(0.05, gate.opened.set).start()
    # This one is waited for.
    assert first.take(stream).is_pinned()
    settle()
    assert log == [(3, False), (3, True)]


@pytest.mark.parametrize("when", ["begun", "done", "not begun"])
@pytest.mark.parametrize("how", ["drop", "reset", "reorder", "fork"])
def test_nothing_is_left_of_a_chunk_that_nobody_takes(
    gpu: Simulation, monkeypatch: pytest.MonkeyPatch, how: str, when: str
) -> None:
    gate = Gate(monkeypatch)
    busy = PendingChunk(FORM) if when == "not begun" else None
    store = store_of(HostMemory(GPU), 40, 40)
    store.append(block(0, 10))
    assert gate.reached.wait(30)
    if when == "done":
        gate.open()
    assert store._pending is not None
    assert len(gpu.registered) == 1 + (when == "done")
    store.memory.synchronize()
    gone = weakref.ref(store)
    gc.disable()
    try:
        if how == "reset":
            store.reset()
        elif how == "reorder":
            store.reorder(torch.zeros(2, dtype=torch.long, device="cuda"))
        elif how == "fork":
            twin = store.fork()
            assert twin._pending is None
            del store
            twin.append(block(10, 10))
        else:
            del store
        # The thread keeps no store alive.
        assert how in ("reset", "reorder") or gone() is None
        del busy
        gate.open()
        assert len(gpu.registered) == {"drop": 0, "reset": 0, "reorder": 1, "fork": 2}[how]
    finally:
        gc.enable()


def test_errors_of_the_thread_reach_who_takes_the_chunk(
    gpu: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, store = Gate(monkeypatch), store_of(HostMemory(GPU), 40, 40)
    store.append(block(0, 10))
    assert gate.reached.wait(30)
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "cudaHostRegister", lambda *args: 2)
        gate.open()
        with pytest.raises(MemoryError, match="ulimit -l"):
            store.append(block(10, 10))
    # What there was before is still there, and a later try is a new one.
    check(store, 10)
    store.append(block(10, 10))
    check(store, 20)


def test_python_does_not_wait_for_chunks_at_its_end(
    gpu: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(pinning, "_PIECE_BYTES", PAGE_BYTES)
    begun, queued = PendingChunk(FORM), PendingChunk(FORM)
    assert gate.reached.wait(30)
    monkeypatch.setattr(pinning, "_is_ending", threading.Event())
    pinning._is_ending.set()
    gate.open()
    assert not gpu.registered
    assert not HostMemory(GPU).prepares(1)
    # Another thread may go on meanwhile, and finds that no work is taken any more.
    monkeypatch.setattr(pinning._worker, "submit", _refuses)
    chunks = [each.take(torch.cuda.Stream(GPU)) for each in (begun, queued, PendingChunk(FORM))]
    assert len(gpu.registered) == len(chunks) == 3


def _refuses(*args: Any) -> None:
    raise RuntimeError("cannot schedule new futures after interpreter shutdown")


_ENDS = """
import contextlib, time, types, torch
from hf_kvret.stores import pinning

def populate(raw):
    print("piece", flush=True)
    time.sleep(0.5)

pinning.populate, pinning._PIECE_BYTES = populate, 4096
torch.cuda.device = lambda device: contextlib.nullcontext()
form = pinning.Chunk((64, 1024), torch.float32, torch.device("cuda", 0))
kept = [pinning.PendingChunk(form) for _ in range(3)]
"""


@pytest.mark.slow
def test_a_process_ends_after_the_piece_that_is_under_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() in ([], ["piece"])
    assert not done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no child processes like this here")
def test_a_child_process_neither_waits_for_the_thread_nor_unpins(
    gpu: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, stream = Gate(monkeypatch), torch.cuda.Stream(GPU)
    taken = HostMemory(GPU).allocate((3, 4), torch.float32)
    pending, dropped = PendingChunk(FORM), PendingChunk(FORM)
    assert gate.reached.wait(30)
    # As if the thread were about to begin.
    dropped._future._condition.acquire()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        before = len(gpu.registered)
        del taken, dropped
        unpinned = before - len(gpu.registered)
        made = pending.take(stream)
        os._exit(unpinned + 2 * (not made.is_pinned()))
    dropped._future._condition.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.open()


def test_a_pending_chunk_is_none_in_another_process(gpu: Simulation) -> None:
    pending = PendingChunk(FORM)
    assert pickle.loads(pickle.dumps(pending)) is None
    assert copy.copy(pending) is None
    pending.take(torch.cuda.Stream(GPU))


def test_populated_pages_are_there() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mincore"):
        pytest.skip("nobody says which pages are there")
    count = 64
    raw = mapped(count * mmap.PAGESIZE, inherited=False)
    there = (ctypes.c_ubyte * count)()
    half = raw[: count // 2 * mmap.PAGESIZE]
    if ctypes.CDLL(None).madvise(
        ctypes.c_void_p(half.data_ptr()), ctypes.c_size_t(mmap.PAGESIZE), 23
    ):
        pytest.skip("this kernel does not populate on request")
    populate(half)
    assert libc.mincore(ctypes.c_void_p(raw.data_ptr()), ctypes.c_size_t(raw.nbytes), there) == 0
    assert [bool(one & 1) for one in there] == [True] * 32 + [False] * 32
