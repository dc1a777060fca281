"""PagedStore against plain dense rows: appends, page edges, reorders, forks and crops."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory, SplitMemory

CPU = torch.device("cpu")
Dense = tuple[torch.Tensor, torch.Tensor]
HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6
# Of a split memory: ten pages of four tokens.
BUDGET = 10 * HEADS * 4 * (KEY_DIM + VALUE_DIM) * 4


class PoisonedDevice(DeviceMemory):
    """New pages hold NaN: whoever reads spare capacity shows it."""

    def allocate(self, *options: Any) -> torch.Tensor:
        return super().allocate(*options).fill_(float("nan"))


class PoisonedSplit(SplitMemory):
    """The same, with room for a few pages on the device and the others on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, budget=BUDGET)

    def allocate(self, *options: Any) -> torch.Tensor:
        return super().allocate(*options).fill_(float("nan"))


class PoisonedHost(HostMemory):
    """The same in host memory."""

    def allocate(self, *options: Any) -> torch.Tensor:
        return super().allocate(*options).fill_(float("nan"))


MEMORIES: list[Callable[[torch.device], PageMemory]] = [
    PoisonedDevice,
    PoisonedHost,
    PoisonedSplit,
]


def _tokens(batch: int, count: int, generator: torch.Generator) -> Dense:
    keys = torch.randn(batch, HEADS, count, KEY_DIM, generator=generator)
    return keys, torch.randn(batch, HEADS, count, VALUE_DIM, generator=generator)


def _append(store: PagedStore, tokens: Dense) -> None:
    store.append(TokenBlock(*tokens, start=len(store)))


def _filled(memory: PageMemory, *counts: int, page_len: int = 4, batch: int = 2) -> tuple:
    generator = torch.Generator().manual_seed(0)
    store, chunks = PagedStore(memory, page_len), []
    for count in counts:
        chunks.append(_tokens(batch, count, generator))
        _append(store, chunks[-1])
    keys, values = zip(*chunks, strict=True)
    return store, (torch.cat(keys, dim=2), torch.cat(values, dim=2))


def _check(store: PagedStore, expected: Dense, chunk_len: int) -> None:
    keys, values = expected
    assert len(store) == keys.shape[2]
    end = 0
    for start, some_keys, some_values in store.chunks(chunk_len):
        assert start == end
        end += some_keys.shape[2]
        assert torch.equal(some_keys, keys[:, :, start:end])
        assert torch.equal(some_values, values[:, :, start:end])
    assert end == keys.shape[2]
    if end:
        slots = torch.arange(end - 1, -1, -1, dtype=torch.int32)
        ids = torch.cat([slots, torch.tensor([-1], dtype=torch.int32)])
        ids = ids.expand(len(keys), HEADS, 1, -1)
        got_keys, got_values = store.gather(ids)
        assert torch.equal(got_keys[:, :, 0, :-1], keys.flip(2))
        assert torch.equal(got_values[:, :, 0, :-1], values.flip(2))
        assert not got_keys[:, :, 0, -1].any() and not got_values[:, :, 0, -1].any()


@pytest.mark.parametrize("make_memory", MEMORIES)
@pytest.mark.parametrize("seed", range(2))
def test_no_operation_changes_what_another_row_or_fork_reads(
    make_memory: Callable[[torch.device], PageMemory], seed: int
) -> None:
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    store, dense = _filled(make_memory(CPU), 6)
    pairs: list[tuple[PagedStore, Dense]] = [(store, dense)]
    for _ in range(60):
        place = choose.randrange(len(pairs))
        store, (keys, values) = pairs[place]
        kind = choose.choice(["append", "append", "append", "crop", "reorder", "fork", "load"])
        if kind == "append":
            more = _tokens(len(keys), choose.randint(0, 9), generator)
            _append(store, more)
            keys, values = torch.cat([keys, more[0]], dim=2), torch.cat([values, more[1]], dim=2)
        elif kind == "crop":
            length = choose.randint(max(0, len(store) - 7), len(store))
            store.crop(length)
            keys, values = keys[:, :, :length], values[:, :, :length]
        elif kind == "reorder":
            order = torch.tensor([choose.randrange(len(keys)) for _ in range(choose.randint(1, 3))])
            store.reorder(order)
            keys, values = keys[order], values[order]
        elif kind == "load":
            state, store = store.state_dict(), PagedStore(make_memory(CPU), 4)
            if not state:
                keys, values = keys[:, :, :0], values[:, :, :0]
            store.load_state_dict(state, CPU)
        elif len(pairs) < 5:
            pairs.append((store.fork(), (keys, values)))
        else:
            pairs.pop(choose.randrange(len(pairs)))
            continue
        pairs[place] = store, (keys, values)
        for held, wanted in pairs:
            _check(held, wanted, chunk_len=choose.choice([1, 4, 9, 64]))


@pytest.mark.factor("make_memory", MEMORIES)
@pytest.mark.factor("length", [1, 3, 4, 5, 8, 9])
@pytest.mark.factor("more", [1, 3, 4, 5])
def test_appends_meet_at_page_edges(
    make_memory: Callable[[torch.device], PageMemory], length: int, more: int
) -> None:
    store, dense = _filled(make_memory(CPU), length, more, 1)
    _check(store, dense, chunk_len=4)


@pytest.mark.parametrize("group", [1, 2])
def test_attend_is_softmax_over_the_chosen_rows(group: int) -> None:
    store, (keys, values) = _filled(PoisonedDevice(CPU), 5, 6)
    query = torch.randn(2, HEADS * group, 1, KEY_DIM)
    ids = torch.tensor([0, 7, -1, 10, 3], dtype=torch.int32).expand(2, HEADS, 1, -1).contiguous()
    out, lse = store.attend(query, ids, scale=0.7)
    chosen = torch.tensor([0, 7, 10, 3])
    some_keys = keys[:, :, chosen].repeat_interleave(group, dim=1).double()
    some_values = values[:, :, chosen].repeat_interleave(group, dim=1).double()
    scores = query.double() @ some_keys.transpose(-1, -2) * 0.7
    # fp32 against fp64 over four tokens.
    torch.testing.assert_close(out, (scores.softmax(-1) @ some_values).float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, scores.logsumexp(-1).float(), atol=1e-5, rtol=0)


def test_attending_to_nothing_gives_zero_and_minus_infinity() -> None:
    store, _ = _filled(PoisonedDevice(CPU), 5)
    ids = torch.full((2, HEADS, 1, 3), -1, dtype=torch.int32)
    out, lse = store.attend(torch.randn(2, HEADS, 1, KEY_DIM), ids, scale=1.0)
    assert torch.equal(out, torch.zeros(2, HEADS, 1, VALUE_DIM))
    assert (lse == float("-inf")).all()


def test_a_fork_shares_pages_and_reordering_copies_no_row() -> None:
    store, dense = _filled(PoisonedDevice(CPU), 10)
    twin = store.fork()
    before = store.nbytes()
    twin.reorder(torch.tensor([1, 1, 0]))
    assert twin.nbytes() - before == 3 * 4, "one more table row of three pages"
    _check(twin, (dense[0][[1, 1, 0]], dense[1][[1, 1, 0]]), chunk_len=4)
    _check(store, dense, chunk_len=4)


def test_bytes_are_exact_and_in_the_right_memory() -> None:
    # A prompt of 9 tokens is 3 pages of 4 tokens a row; 2 rows, 2 heads, rows of 10 floats.
    rows, table = 2 * 3 * HEADS * 4 * (KEY_DIM + VALUE_DIM) * 4, 2 * 3 * 4
    on_device, _ = _filled(DeviceMemory(CPU), 9)
    assert (on_device.nbytes(), on_device.host_nbytes()) == (rows + table, 0)
    on_host, _ = _filled(HostMemory(CPU), 9)
    assert (on_host.nbytes(), on_host.host_nbytes()) == (table + rows, rows)
    assert PagedStore(HostMemory(CPU)).host_nbytes() == 0


def test_host_and_device_memory_answer_alike() -> None:
    stores = [_filled(memory(CPU), 7, 2, 30)[0] for memory in (DeviceMemory, HostMemory)]
    query = torch.randn(2, 2 * HEADS, 3, KEY_DIM)
    ids = torch.randint(0, 39, (2, HEADS, 3, 9), dtype=torch.int32)
    (out, lse), (other_out, other_lse) = (store.attend(query, ids, 0.5) for store in stores)
    assert torch.equal(out, other_out) and torch.equal(lse, other_lse)


def test_a_block_out_of_order_is_refused() -> None:
    store, _ = _filled(DeviceMemory(CPU), 5)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="block starts at slot 6, the store ends at 5"):
        store.append(TokenBlock(*_tokens(2, 1, generator), start=6))


def test_an_empty_store_says_so() -> None:
    store = PagedStore(DeviceMemory(CPU))
    assert len(store) == 0 and list(store.chunks()) == [] and store.state_dict() == {}
    with pytest.raises(RuntimeError, match="append first"):
        store.gather(torch.zeros(1, 1, 1, 1, dtype=torch.int32))
