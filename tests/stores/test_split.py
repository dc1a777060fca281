"""Rows split by a byte budget: where they lie, that it changes no result, and who gets how much."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import ParisKVCache
from hf_kvret.contracts.store import FirstRows
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.stores import PagedStore, StoreChoice
from hf_kvret.stores.memory import SplitMemory
from hf_kvret.testing.scenario import prompt

from .rows import CPU, HEADS, extend

KEY_DIM, VALUE_DIM, PAGE_LEN = 4, 6, 4
PAGE = HEADS * PAGE_LEN * (KEY_DIM + VALUE_DIM) * 4


def _store(pages: float, page_len: int = PAGE_LEN) -> PagedStore:
    """An empty store with a budget for so many pages."""
    return PagedStore(SplitMemory(CPU, int(pages * PAGE)), page_len)


def _rows(store: PagedStore) -> tuple[int, int]:
    """Bytes of rows on the device and on the host, without the page table."""
    host, table = store.host_nbytes(), store.paged_rows().table.nbytes
    return store.nbytes() - host - table, host


@pytest.mark.parametrize(
    ("pages", "near", "far"),
    [(1, 0, 6), (2, 2, 4), (3.9, 2, 4), (6, 6, 0), (900, 6, 0)],
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
    other = store.fork()
    extend(other, count=2 * PAGE_LEN)
    assert _rows(other) == (10 * PAGE, 2 * PAGE)


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
