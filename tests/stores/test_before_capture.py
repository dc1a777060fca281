"""A captured decode step asks stores whether it can be, and finds that writes have arrived."""

from typing import Any

import pytest
import torch

from hf_kvret.stores import CpuStore, PagedStore, QuantizedStore, ResidentStore, Store
from hf_kvret.stores.memory import DeviceMemory, HostMemory

from .rows import CPU, HEADS, extend, same_ids

DIM = 16


class Write:
    """Stands in for the event of a copy: notes who waits for it."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def synchronize(self) -> None:
        self.waits.append("host")


def _append(store: Store, count: int = 70) -> None:
    extend(store, count=count, dims=(DIM, DIM))


def _attend(store: Store, batch: int = 2) -> None:
    ids = same_ids(*range(5), batch=batch)
    store.begin(torch.randn(batch, HEADS, 1, DIM), ids, 1.0)()


@pytest.mark.parametrize("store_name", ["host", "resident", "cpu", "coded"])
def test_a_capture_waits_for_writes_on_the_host_and_leaves_none(store_name: str) -> None:
    host, resident, cpu = HostMemory(CPU), ResidentStore(CPU), CpuStore(CPU)
    store, memory = {
        "host": (PagedStore(host), host),
        "resident": (resident, resident.rows.memory),
        "cpu": (cpu, cpu.rows.memory),
        "coded": (QuantizedStore(host, 4), host),
    }[store_name]
    assert isinstance(memory, HostMemory)
    _append(store)
    write: Any = Write()
    memory._last_write = write
    _attend(store)
    assert write.waits, "a reader waits for what is being written"
    write.waits.clear()
    store.before_capture()
    assert write.waits == ["host"]
    _attend(store)
    store.before_capture()
    assert write.waits == ["host"], "what has arrived is forgotten"


class Table(torch.Tensor):
    """Stands in for a table of pages on a GPU."""

    is_cuda = True


def test_a_capture_makes_the_addresses_that_a_kernel_would_make() -> None:
    """Made while a step is captured, they would not be there before its first replay."""
    store = PagedStore(DeviceMemory(CPU))
    for count in (70, 200):
        _append(store, count)
        assert store._table is not None
        store._table = store._table.as_subclass(Table)
        store.before_capture()
        addresses = store.paged_rows().page_address
        assert addresses is not None and len(addresses) == sum(map(len, store.paged_rows().chunks))


@pytest.mark.parametrize(
    ("store", "over_bus", "obstacle"),
    [
        (PagedStore(DeviceMemory(CPU)), False, None),
        (PagedStore(HostMemory(CPU)), True, None),
        (QuantizedStore(HostMemory(CPU), 2), True, None),
        (ResidentStore(CPU), True, "have served no step since its rows changed"),
        (CpuStore(CPU), False, "store='cpu' attends on the CPU"),
    ],
)
def test_a_store_says_why_not_captured(store: Store, over_bus: bool, obstacle: str | None) -> None:
    _append(store)
    assert store.over_bus == over_bus
    assert (obstacle or "") in (store.capture_obstacle or "")
    assert (store.capture_obstacle is None) == (obstacle is None)


def test_slots_can_be_captured_once_they_served_the_rows_as_they_are() -> None:
    store = ResidentStore(CPU, 2.0)
    _append(store)
    words = "store='resident' have served no step since its rows changed"

    def check_ready_after_a_step(batch: int = 2) -> None:
        assert words in (store.capture_obstacle or "")
        _attend(store, batch=batch)
        assert store.capture_obstacle is None

    check_ready_after_a_step()
    _append(store, 10)
    check_ready_after_a_step()
    store.crop(60)
    check_ready_after_a_step()
    assert words in (store.fork().capture_obstacle or "")
    assert store.capture_obstacle is None
    store.reorder(torch.tensor([1, 0, 0]))
    check_ready_after_a_step(batch=3)


class Silent(Store):
    """A store of a user's own, that says nothing of capturing."""

    __len__ = append = begin = gather = chunks = lambda *args, **options: 0


def test_a_store_that_says_nothing_is_not_captured() -> None:
    store = Silent()
    store.before_capture()
    assert store.capture_obstacle == "the store Silent does not say that its steps can be captured"
    assert not store.over_bus
