"""Rows split by a byte budget: where they lie, that it changes no result, and who gets how much."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import ParisKVCache, TokenBlock
from hf_kvret.contracts.store import FirstRows
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.stores import PagedStore, StoreChoice
from hf_kvret.stores.memory import DeviceMemory, SplitMemory
from hf_kvret.testing.scenario import prompt

from .rows import CPU, HEADS, extend

KEY_DIM, VALUE_DIM, PAGE_LEN = 4, 6, 4
PAGE = HEADS * PAGE_LEN * (KEY_DIM + VALUE_DIM) * 4


def _store(pages: float, page_len: int = PAGE_LEN) -> PagedStore:
    """An empty store with a budget for so many pages."""
    return PagedStore(SplitMemory(CPU, int(pages * PAGE)), page_len)


def _check_alike(stores: list[PagedStore], query: torch.Tensor, ids: torch.Tensor) -> None:
    """Whatever is asked of the two stores has the same answer, to the bit."""
    answers = (
        [
            *store.begin(query, ids, 0.5, 3.0)(),
            store.scores(query, ids, 0.5),
            store.best(query, ids, 7, 0.5),
            *store.gather(ids),
            *store.state_dict().values(),
            *(tensor for _, *tensors in store.chunks(5) for tensor in tensors),
        ]
        for store in stores
    )
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


def _rows(store: PagedStore) -> tuple[int, int]:
    """Bytes of rows on the device and on the host, without the page table."""
    host, table = store.host_nbytes(), store.paged_rows().table.nbytes
    return store.nbytes() - host - table, host


@pytest.mark.parametrize(
    ("pages", "near", "far"),
    [(0.5, 0, 6), (1, 0, 6), (2, 2, 4), (3.9, 2, 4), (4, 4, 2), (5, 4, 2), (6, 6, 0), (900, 6, 0)],
)
def test_the_first_pages_of_every_row_are_on_the_device_as_far_as_they_fit(
    pages: float, near: int, far: int
) -> None:
    store = _store(pages)
    extend(store, count=9)
    assert _rows(store) == (near * PAGE, far * PAGE)
    assert [len(chunk) for chunk in store.paged_rows().chunks] == [n for n in (near, far) if n]
    assert store.bus_share == pytest.approx(far / 6)
    # The first tokens, which stay, are all on the device.
    store.crop(near // 2 * PAGE_LEN)
    assert store.bus_share == (0.0 if near else 1.0)


def test_forks_share_the_budget_and_give_back_what_nobody_holds() -> None:
    store = _store(10)
    extend(store, count=3 * PAGE_LEN)
    twin = store.fork()
    extend(twin, count=2 * PAGE_LEN)
    assert _rows(twin) == (10 * PAGE, 0)
    extend(store, count=PAGE_LEN)
    assert _rows(store) == (6 * PAGE, 2 * PAGE)
    assert twin.bus_share == 0.0 and store.bus_share == 0.25
    assert twin.fork().nbytes() == twin.nbytes()
    del twin
    gc.collect()
    other = store.fork()
    extend(other, count=2 * PAGE_LEN)
    assert _rows(other) == (10 * PAGE, 2 * PAGE)


def test_no_more_than_the_budget_is_ever_held() -> None:
    choose = random.Random(0)
    first = _store(30)
    extend(first, count=9)
    stores, most = [first], 0
    for step in range(80):
        store = choose.choice(stores)
        batch = len(store.paged_rows().table)
        operation = choose.choice(["append", "append", "crop", "reorder", "fork", "drop"])
        if operation == "append":
            extend(store, count=choose.randint(1, 12), batch=batch, seed=step)
        elif operation == "crop" and len(store) > 9:
            store.crop(len(store) - choose.randint(1, 8))
        elif operation == "reorder":
            store.reorder(torch.randint(batch, (choose.randint(1, 3),)))
        elif operation == "fork" and len(stores) < 4:
            stores.append(store.fork())
        elif operation == "drop" and len(stores) > 1:
            stores.remove(store)
        chunks = {
            chunk.data_ptr(): chunk.nbytes
            for each in stores
            for chunk in each.paged_rows().chunks
            if not each.memory.on_host(chunk)
        }
        most = max(most, sum(chunks.values()))
        assert most <= 30 * PAGE
    assert most > 20 * PAGE


def test_without_a_budget_it_is_half_of_what_is_free_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory that torch has in reserve is free, too."""
    choice = StoreChoice(FlatConfig(store="split", device_budget="10KB"), 3, 3)
    store = choice.make(FirstRows(CPU, 10**9, 1))
    assert isinstance(store, PagedStore) and isinstance(store.memory, SplitMemory)
    assert store.memory.budget == 10_000 // 3, "each layer gets an equal share"
    choice = StoreChoice(FlatConfig(store="split"), 4, 4)
    with pytest.raises(ValueError, match=r"store='split' on cpu.*; give device_budget, as"):
        choice.make(FirstRows(CPU, 1000, 1))
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (961, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 161)
    assert choice._budget(device) == 500


SMALL = {"top_k": 20, "sink": 2, "recent": 8, "flush": 4, "dense_below": 0}
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def test_a_cache_with_a_budget_splits_and_says_so(llama: PreTrainedModel) -> None:
    ids = prompt(2, 300)
    plain = ParisKVCache(llama.config, store="device", **SMALL)
    expected = llama.generate(ids, past_key_values=plain, **GREEDY)
    layers = len(plain.retrieval_layers)
    # Two of the five pages of each of two rows.
    page = plain.memory().store_device // layers // 5 // 2
    split = ParisKVCache(llama.config, device_budget=4 * page * layers, **SMALL)
    assert torch.equal(llama.generate(ids, past_key_values=split, **GREEDY), expected)
    assert split.stats()["store"] == "split"
    rows = plain.memory().store_device
    memory = split.memory()
    assert 0.3 * rows < memory.store_device < 0.5 * rows
    assert 0.5 * rows < memory.store_host < 0.7 * rows
    assert {layer.kv.store.bus_share for layer in split.retrieval_layers} == {0.6}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pages", [0.5, 3, 7, 900])
def test_a_gpu_reads_both_parts(pages: float) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    stores = [
        PagedStore(memory, PAGE_LEN)
        for memory in (SplitMemory(device, int(pages * PAGE)), DeviceMemory(device))
    ]
    for step, count in enumerate((21, 4, 7)):
        generator = torch.Generator().manual_seed(step)
        keys = torch.randn(2, HEADS, count, KEY_DIM, generator=generator).to(device)
        values = torch.randn(2, HEADS, count, VALUE_DIM, generator=generator).to(device)
        for store in stores:
            store.append(TokenBlock(keys, values, len(store)))
    devices = {chunk.device.type for chunk in stores[0].paged_rows().chunks}
    assert devices == ({"cpu"} if pages < 1 else {"cuda"} if pages > 99 else {"cpu", "cuda"})
    stores[0].before_capture()
    query = torch.randn(2, 2 * HEADS, 1, KEY_DIM, device=device)
    ids = torch.rand(2, HEADS, 1, 32, device=device).argsort(-1)[..., :20].int()
    _check_alike(stores, query, ids)
