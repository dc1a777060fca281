"""Where cold keys and values live, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_kvret.config import RetrievalConfig
from hf_kvret.sizes import byte_count
from hf_kvret.stores.base import Store, StoreBytes
from hf_kvret.stores.cpu import CpuStore
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory, SplitMemory
from hf_kvret.stores.paged import PagedStore
from hf_kvret.stores.quantized import QuantizedStore
from hf_kvret.stores.resident import ResidentStore

__all__ = [
    "STORES",
    "CpuStore",
    "PagedStore",
    "QuantizedStore",
    "ResidentStore",
    "Store",
    "StoreBytes",
    "StoreChoice",
    "store_names",
]

STORES: dict[str, Callable[[torch.device, RetrievalConfig], Store]] = {
    "device": lambda device, options: PagedStore(DeviceMemory(device)),
    "host": lambda device, options: PagedStore(HostMemory(device)),
    "resident": lambda device, options: ResidentStore(device, options.slots),
    "cpu": lambda device, options: CpuStore(device),
    "higgs": lambda device, options: _coded(DeviceMemory(device), options),
    "higgs-host": lambda device, options: _coded(HostMemory(device), options),
}


def _coded(memory: PageMemory, options: RetrievalConfig) -> Store:
    """Rows of ``options.bits``; 16 are rows as they are."""
    return PagedStore(memory) if options.bits == 16 else QuantizedStore(memory, options.bits)


SPLIT = "split"
"""The store whose share of the device's memory depends on how many layers there are."""


def store_names() -> str:
    """Every value of the option ``store``, for messages and help."""
    return ", ".join([*STORES, SPLIT, "auto"])


class StoreChoice:
    """Makes the stores of one cache, all of the kind that was asked for.

    With ``"auto"`` the first layer that needs a store decides for all: the host where the GPU
    would lose more than a quarter of its free memory, else the device; split where there is a
    budget. Of the budget each layer gets an equal share, since a prompt comes layer by layer.

    Attributes:
        parts: chunks that the prompt is read in; a layer's first block is of the first one.
        tokens: of the prompt.
    """

    def __init__(self, options: RetrievalConfig, layers: int) -> None:
        """For a cache with these options and ``layers`` retrieval layers.

        Raises:
            ValueError: ``options.store`` is neither ``"auto"`` nor a key of ``STORES``.
        """
        name = SPLIT if options.splits_rows else options.store
        if name not in ("auto", SPLIT, *STORES):
            raise ValueError(f"store={name!r}: choose one of {store_names()}")
        self.name = None if name == "auto" else name
        self._options = options
        self._layers = layers
        self._share: int | None = None
        self.parts, self.tokens = 1, 0

    def make(self, device: torch.device, cold_bytes: int) -> Store:
        """An empty store for queries on ``device``, whose first block takes ``cold_bytes``.

        Raises:
            ValueError: a store that does not work on ``device``, or a split one without a budget
                where none can be found.
        """
        if self.name is None:
            self.name = self._choose(device, cold_bytes * self.parts * self._layers)
        if self.name != "device" and device.type not in ("cpu", "cuda"):
            raise ValueError(f"store={self.name!r} on {device}: only store='device' works there")
        store: Store
        if self.name == SPLIT:
            if self._share is None:
                self._share = self._budget(device) // self._layers
            store = PagedStore(SplitMemory(device, self._share))
        else:
            store = STORES[self.name](device, self._options)
        if self.parts > 1:
            store.expect(self.tokens)
        return store

    def _budget(self, device: torch.device) -> int:
        """Bytes of device memory for the rows of all layers."""
        if self._options.device_budget is not None:
            return byte_count(self._options.device_budget)
        if device.type != "cuda":
            raise ValueError(
                f"store='split' on {device} has no device memory to look at: give device_budget, "
                "as device_budget='90GB'"
            )
        free, _ = torch.cuda.mem_get_info(device)
        return free // 2

    @staticmethod
    def _choose(device: torch.device, cold_bytes: int) -> str:
        if device.type != "cuda":
            return "device"
        free, _ = torch.cuda.mem_get_info(device)
        return "host" if cold_bytes > free // 4 else "device"
