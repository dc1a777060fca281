"""Reading a store in pieces: the kernel's path, what is held meanwhile, what follows a piece."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.stores import PagedStore, paged
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory
from hf_kvret_kernels._dispatch import prefer
from hf_kvret_kernels.page_copy import copy_pages
from hf_kvret_kernels.paged import PagedRows

CPU = torch.device("cpu")
MEMORIES = [DeviceMemory, HostMemory]


def _filled(
    memory: PageMemory, *counts: int, page_len: int = 4
) -> tuple[PagedStore, torch.Tensor, torch.Tensor]:
    """A store of three rows after appends of so many tokens, and what it holds."""
    generator = torch.Generator().manual_seed(0)
    store = PagedStore(memory, page_len)
    keys = torch.randn(3, 2, sum(counts), 6, generator=generator)
    values = torch.randn(3, 2, sum(counts), 10, generator=generator)
    start = 0
    for count in counts:
        part = slice(start, start + count)
        store.append(TokenBlock(keys[:, :, part], values[:, :, part], start))
        start += count
    return store, keys, values


@pytest.mark.parametrize("make_memory", MEMORIES)
@pytest.mark.parametrize("piece_len", [1, 4, 9, 24, 1000])
def test_the_kernel_reads_the_same_pieces(
    make_memory: Callable[[torch.device], PageMemory], piece_len: int
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    store, keys, values = _filled(make_memory(CPU), 13, 2, 30)
    order = torch.tensor([2, 0, 2])
    store.reorder(order)
    with prefer("triton"):
        pieces = list(store.chunks(piece_len))
    assert [start for start, _, _ in pieces] == list(range(0, 45, max(4, piece_len // 4 * 4)))
    assert torch.equal(torch.cat([piece[1] for piece in pieces], dim=2), keys[order])
    assert torch.equal(torch.cat([piece[2] for piece in pieces], dim=2), values[order])


def test_a_piece_is_nobodys_but_the_readers() -> None:
    store, keys, _ = _filled(DeviceMemory(CPU), 20)
    for _, some_keys, some_values in store.chunks(8):
        some_keys.fill_(float("nan"))
        some_values.fill_(float("nan"))
    assert torch.equal(torch.cat([piece[1] for piece in store.chunks(8)], dim=2), keys)


def test_a_piece_that_was_dropped_is_gone_when_the_next_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, _, _ = _filled(DeviceMemory(CPU), 40)
    made: list[weakref.ref[torch.Tensor]] = []

    def copy(rows: PagedRows, first: int, last: int, programs: int | None) -> torch.Tensor:
        assert all(piece() is None for piece in made)
        piece = copy_pages(rows, first, last)
        made.append(weakref.ref(piece))
        return piece

    monkeypatch.setattr(paged, "copy_pages", copy)
    for _, keys, values in store.chunks(8):
        assert keys.shape[2] == values.shape[2] == 8
        del keys, values
    assert len(made) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pieces_from_pinned_memory_arrive_in_time() -> None:
    """Read on a stream of its own while the one before is used: three rounds, long pieces."""
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
            wanted = keys[:, :, start:end]
            # Work that a piece must outlive, launched before the next one is asked for.
            busy = torch.randn(2048, 2048, device=device)
            busy = busy @ busy @ busy
            assert torch.equal(some_keys, wanted) and torch.equal(some_values, -wanted)
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
        sizes.append(store.nbytes().device)
        held = torch.cat([keys for _, keys, _ in store.chunks()], dim=2)
        assert torch.equal(held, torch.cat([blocks[0] + number for number in range(5)], dim=2))
    row = 2 * 2 * 16 * 4
    table = 2 * 25 * 4
    # 1,700 tokens are 27 pages; by itself the store grows block by block, by an eighth at least.
    assert sizes == [25 * 64 * row + table, 27 * 64 * row + table]
