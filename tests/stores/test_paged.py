"""PagedStore: bytes, sharing, and reading in chunks: what is in memory meanwhile, what follows."""

import os
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hf_kvret import FlatKVCache, TokenBlock
from hf_kvret.stores import CpuStore, PagedStore, chunks, memory, paged
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory
from hf_kvret.testing import COVERING_OPTIONS
from hf_kvret.testing.scenario import prompt
from hf_kvret_kernels.paged import PagedRows, copy_pages

from .rows import CPU, HEADS, extend


def filled(memory: PageMemory, *counts: int) -> tuple[PagedStore, torch.Tensor, torch.Tensor]:
    """A store of three sequences, in pages of 4 tokens, after appends of so many tokens."""
    store = PagedStore(memory, 4)
    rows = [
        extend(store, count=count, batch=3, dims=(6, 10), seed=seed)
        for seed, count in enumerate(counts)
    ]
    keys, values = (torch.cat(tensors, dim=2) for tensors in zip(*rows, strict=True))
    return store, keys, values


def test_a_fork_shares_pages_and_reordering_copies_no_row() -> None:
    store, *_ = filled(DeviceMemory(CPU), 10)
    twin = store.fork()
    twin.reorder(torch.tensor([1, 1, 0, 2]))
    assert twin.nbytes() - store.nbytes() == 3 * 4, "one more sequence of 3 pages in the table"


def test_a_dropped_token_is_not_saved() -> None:
    store, *_ = filled(DeviceMemory(CPU), 10)
    store.crop(9)
    assert not store.state_dict()["pages"][:, -1, :, 1:].any()


def test_bytes_are_exact_and_in_the_right_memory() -> None:
    # A prompt of 9 tokens is 3 pages of 4 tokens; 3 sequences, 2 heads, rows of 16 floats.
    rows, table = 3 * 3 * HEADS * 4 * (6 + 10) * 4, 3 * 3 * 4
    on_device, *_ = filled(DeviceMemory(CPU), 9)
    assert (on_device.nbytes(), on_device.host_nbytes()) == (rows + table, 0)
    on_host, *_ = filled(HostMemory(CPU), 9)
    assert (on_host.nbytes(), on_host.host_nbytes()) == (table + rows, rows)
    by_cpu = CpuStore(CPU)
    extend(by_cpu, count=9, batch=3, dims=(6, 10))
    assert by_cpu.host_nbytes() == by_cpu.nbytes() > rows
    assert PagedStore(HostMemory(CPU)).host_nbytes() == 0


def test_reading_begins_before_the_first_chunk_is_taken(watch: Any) -> None:
    """So that rows come over a bus while something else is done."""
    store, _, _ = filled(DeviceMemory(CPU), 37)
    starts = watch(paged, "read_ahead", lambda *_: 1)
    for reader in (store.chunks, store.key_chunks):
        starts.clear()
        chunks = reader(8)
        assert starts == [1]
        assert len(list(chunks)) == 5


def test_a_dropped_chunk_is_freed_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, _ = filled(DeviceMemory(CPU), 40)
    chunks: list[weakref.ref[torch.Tensor]] = []

    def copy(rows: PagedRows, first: int, last: int, **options: Any) -> torch.Tensor:
        assert all(chunk() is None for chunk in chunks)
        chunk = copy_pages(rows, first, last)
        chunks.append(weakref.ref(chunk))
        return chunk

    monkeypatch.setattr(paged, "copy_pages", copy)
    for _, keys, values in store.chunks(8):
        assert keys.shape[2] == values.shape[2] == 8
        del keys, values
    assert len(chunks) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_chunks_from_pinned_memory_arrive_in_time() -> None:
    """Read on a stream of its own while the one before is used: three rounds, long chunks."""
    device = torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(0)
    store = PagedStore(HostMemory(device))
    keys = torch.randn(1, 8, 40_000, 128, generator=generator).to(device, torch.bfloat16)
    store.append(TokenBlock(keys, -keys, 0))
    for _ in range(3):
        end = 0
        for start, some_keys, some_values in store.chunks(4096):
            assert start == end
            end += some_keys.shape[2]
            expected = keys[:, :, start:end]
            # Work that a chunk must outlive, launched before the next one is taken.
            busy = torch.randn(2048, 2048, device=device)
            busy = busy @ busy @ busy
            assert torch.equal(some_keys, expected) and torch.equal(some_values, -expected)
            del some_keys, some_values
        assert end == 40_000


def test_room_for_a_prompt_in_chunks_is_made_at_once_and_no_larger() -> None:
    """Where an eighth more would not fit, nothing is wasted."""
    blocks = [torch.randn(2, 2, 320, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    sizes = []
    for expected in (0, 1700):
        store = PagedStore(DeviceMemory(torch.device("cpu")))
        store.expect(expected)
        for number in range(5):
            keys, values = blocks
            store.append(TokenBlock(keys + number, values - number, start=320 * number))
        sizes.append(store.nbytes())
        rows = torch.cat([keys for _, keys, _ in store.chunks()], dim=2)
        assert torch.equal(rows, torch.cat([blocks[0] + number for number in range(5)], dim=2))
    row = 2 * 2 * 16 * 4
    table = 2 * 25 * 4
    # 1,700 tokens are 27 pages; by itself the store grows block by block, by an eighth at least.
    assert sizes == [25 * 64 * row + table, 27 * 64 * row + table]


def test_sequences_that_are_repeated_get_no_room_for_stored_tokens() -> None:
    block = torch.randn(1, 2, 320, 8)
    store = PagedStore(DeviceMemory(CPU))
    store.expect(1700)
    store.append(TokenBlock(block, block, 0))
    store.reorder(torch.zeros(8, dtype=torch.long))
    store.append(TokenBlock(*2 * (block.expand(8, -1, -1, -1),), 320))
    row = 2 * 16 * 4 * 64
    # 22 pages are free: 16 of them hold two of the five pages of each row.
    assert store.nbytes() == (27 + 8 * 3) * row + 8 * 10 * 4


def test_chunks_are_read_on_a_stream_of_their_users(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device, self.waited = device, 0

        def synchronize(self) -> None:
            self.waited += 1

    near, far = torch.device("cuda", 0), torch.device("cuda", 1)
    users = {near: Stream(near), far: Stream(far)}
    monkeypatch.setattr(chunks, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: users[device])
    first, other = (chunks.reading_stream(device) for device in (near, far))
    assert first is chunks.reading_stream(near) is not other
    users[near] = Stream(near)
    second = chunks.reading_stream(near)
    assert second is not first
    # Pinned memory is unregistered when nobody reads it any more.
    log: list[int] = []

    class Runtime:
        def cudaHostUnregister(self, address: int) -> None:
            assert first.waited == second.waited == 1
            log.append(address)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    writer = Stream(near)
    memory._unpin(77, writer, os.getpid())  # type: ignore[arg-type]
    assert log == [77] and writer.waited == users[near].waited == 1 and other.waited == 0


def test_a_prompt_in_chunks_reads_no_page(model: Any, watch: Any) -> None:
    """Its rows are in the store already, and are attended to as they came."""
    spans = watch(paged, "copy_pages", lambda rows, first, last, **_: (first, last))
    options = {**COVERING_OPTIONS, "store": "host", "prefill_chunk": 128}
    cache = FlatKVCache(model.config, **options)
    model.generate(prompt(1, 512), past_key_values=cache, max_new_tokens=1)
    layers = len(cache.retrieval_layers)
    assert spans == [span for last in (2, 4, 6) for span in [(0, last)] * layers]
