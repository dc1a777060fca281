"""ResidentStore: slots never change a result, and hits and misses are what they should be."""

import pytest
import torch

from hf_kvret.stores import PagedStore, ResidentStore
from hf_kvret.stores.memory import HostMemory

from .rows import CPU, GROUP, HEADS, extend, same_ids

KEY_DIM, VALUE_DIM = 4, 6


def _pair(slots: int | float, count: int = 40, batch: int = 2) -> tuple[ResidentStore, PagedStore]:
    """A store with slots and a plain one with the same rows."""
    stores = ResidentStore(CPU, slots), PagedStore(HostMemory(CPU))
    extend(*stores, count=count, batch=batch)
    return stores


def _attend_both(
    stores: tuple[ResidentStore, PagedStore], ids: torch.Tensor, softcap: float | None = None
) -> None:
    batch, _, queries, _ = ids.shape
    query = torch.randn(batch, HEADS * GROUP, queries, KEY_DIM)
    results, expected = (store.begin(query, ids, 0.7, softcap)() for store in stores)
    # The same rows in the same order through the same kernel: the same bits.
    assert all(map(torch.equal, results, expected))


def test_what_stays_selected_is_a_hit_and_only_new_tokens_are_missed() -> None:
    store, _ = pair = _pair(1.0)
    _attend_both(pair, same_ids(3, 4, 5, 6))
    rows = 2 * HEADS
    assert store.stats() == {
        "hits": 0,
        "misses": 4 * rows,
        "miss_ratio": 1.0,
        "bytes_missed": 4 * rows * (KEY_DIM + VALUE_DIM) * 4,
    }
    _attend_both(pair, same_ids(6, 9, 5, 4))
    assert (store.stats()["hits"], store.stats()["misses"]) == (3 * rows, 5 * rows)
    # 3 made room for 9.
    _attend_both(pair, same_ids(6, 3, 5, 4))
    assert (store.stats()["hits"], store.stats()["misses"]) == (6 * rows, 6 * rows)


def test_heads_of_a_group_that_want_the_same_row_fetch_it_once() -> None:
    store, _ = pair = _pair(1.0)
    _attend_both(pair, same_ids(1, 2, 3, heads=HEADS * GROUP))
    assert store.stats()["misses"] == 3 * 2 * HEADS
    assert store.stats()["hits"] == 3 * 2 * HEADS * (GROUP - 1)


def test_a_crop_makes_its_tokens_misses_again() -> None:
    """A token of the same number that comes later is another token."""
    pair = _pair(1.0)
    _attend_both(pair, same_ids(36, 38, 39))
    for store in pair:
        store.crop(38)
    extend(*pair, count=6, seed=7)
    assert pair[0]._buffer.slot_map.token.max() == 36, "a dropped token still has a slot"
    _attend_both(pair, same_ids(36, 38, 39))
    assert pair[0].stats()["misses"] == 5 * 2 * HEADS


def test_slots_of_dropped_tokens_are_taken_first() -> None:
    store, _ = pair = _pair(4)
    for chosen in (2, 39, 5, 2):
        for each in pair if chosen == 5 else ():
            each.crop(39)
        _attend_both(pair, same_ids(0, 1, chosen))
    assert store.stats()["misses"] == 5 * 2 * HEADS


def test_a_fork_keeps_the_slots_and_counts_anew() -> None:
    pair = _pair(1.0)
    _attend_both(pair, same_ids(1, 2, 3))
    twin = pair[0].fork()
    assert twin.stats()["misses"] == 0
    assert pair[0]._buffer.rows is not None and twin._buffer._rows is None, "they stay in memory"
    _attend_both((twin, pair[1]), same_ids(1, 2, 3))
    assert twin.stats()["misses"] == 0 and twin.stats()["hits"] == 3 * 2 * HEADS
    _attend_both((twin, pair[1]), same_ids(7, 8, 9))
    _attend_both(pair, same_ids(1, 2, 3))
    assert pair[0].stats()["misses"] == 3 * 2 * HEADS, "the twin's slots are its own"


def test_slots_that_a_query_does_not_fit_into_are_refused() -> None:
    store, _ = _pair(3)
    with pytest.raises(ValueError, match="slots=3, and a query selects 4 rows"):
        store.begin(torch.randn(2, HEADS, 1, KEY_DIM), same_ids(1, 2, 3, 4), 1.0)()


def test_slots_and_table_are_counted_as_device_memory() -> None:
    store, plain = pair = _pair(1.0)
    assert store.nbytes() == plain.nbytes()
    _attend_both(pair, same_ids(1, 2, 3))
    slots = 2 * HEADS * 3 * ((KEY_DIM + VALUE_DIM) * 4 + 4 + 4)
    table = 2 * HEADS * 1024 * 4
    clock_and_counts = 4 + 3 * 8
    assert store.nbytes() - plain.nbytes() == slots + table + clock_and_counts
    assert store.host_nbytes() == plain.host_nbytes()


def test_a_buffer_made_in_inference_mode_is_written_to_outside_of_it() -> None:
    with torch.inference_mode():
        pair = _pair(1.0)
        _attend_both(pair, same_ids(1, 2, 3))
    _attend_both(pair, same_ids(1, 5, 3))
    assert pair[0].stats()["misses"] == 4 * 2 * HEADS
