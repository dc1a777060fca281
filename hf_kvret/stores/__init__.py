"""Where cold keys and values live, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_kvret.config import RetrievalConfig
from hf_kvret.stores.base import Store, StoreBytes
from hf_kvret.stores.cpu import CpuStore
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory
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


def store_names() -> str:
    """Every value of the option ``store``, for messages and help."""
    return ", ".join([*STORES, "auto"])


class StoreChoice:
    """Makes the stores of one cache, all of the kind that was asked for.

    With ``"auto"`` the first layer that needs a store decides for all: the host where the GPU
    would lose more than a quarter of its free memory, else the device.
    """

    def __init__(self, options: RetrievalConfig, layers: int) -> None:
        """For a cache with these options and ``layers`` retrieval layers.

        Raises:
            ValueError: ``options.store`` is neither ``"auto"`` nor a key of ``STORES``.
        """
        name = options.store
        if name != "auto" and name not in STORES:
            raise ValueError(f"store={name!r}: choose one of {store_names()}")
        self.name = None if name == "auto" else name
        self._options = options
        self._layers = layers

    def make(self, device: torch.device, cold_bytes: int) -> Store:
        """An empty store for queries on ``device``, whose first block takes ``cold_bytes``."""
        if self.name is None:
            self.name = self._choose(device, cold_bytes * self._layers)
        if self.name != "device" and device.type not in ("cpu", "cuda"):
            raise ValueError(f"store={self.name!r} on {device}: only store='device' works there")
        return STORES[self.name](device, self._options)

    @staticmethod
    def _choose(device: torch.device, cold_bytes: int) -> str:
        if device.type != "cuda":
            return "device"
        free, _ = torch.cuda.mem_get_info(device)
        return "host" if cold_bytes > free // 4 else "device"
