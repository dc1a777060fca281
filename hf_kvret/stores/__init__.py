"""Where cold keys and values live, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_kvret.contracts.store import FirstRows, Store
from hf_kvret.options.config import RetrievalConfig, byte_count
from hf_kvret.stores.cpu import CpuStore
from hf_kvret.stores.disk import DiskStore, check_folder
from hf_kvret.stores.free_memory import free_bytes
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory, SplitMemory
from hf_kvret.stores.paged import PagedStore
from hf_kvret.stores.placement import UNCODED, choose
from hf_kvret.stores.quantized import QuantizedStore
from hf_kvret.stores.resident import ResidentStore

__all__ = [
    "STORES",
    "CpuStore",
    "DiskStore",
    "PagedStore",
    "QuantizedStore",
    "ResidentStore",
    "Store",
    "StoreChoice",
    "store_names",
]


# Makers of an empty store for queries on a device, by name.
STORES: dict[str, Callable[[torch.device, RetrievalConfig], Store]] = {
    "device": lambda device, options: PagedStore(DeviceMemory(device)),
    "host": lambda device, options: PagedStore(HostMemory(device)),
    "resident": lambda device, options: ResidentStore(device, options.slots),
    "cpu": lambda device, options: CpuStore(device),
    "higgs": lambda device, options: _coded(DeviceMemory(device), options),
    "higgs-host": lambda device, options: _coded(HostMemory(device), options),
}


def _coded(memory: PageMemory, options: RetrievalConfig) -> Store:
    """A store of rows coded in ``options.bits`` bits; uncoded for 16."""
    return PagedStore(memory) if options.bits == UNCODED else QuantizedStore(memory, options.bits)


SPLIT = "split"
"""Name of the store on device and host; each layer gets an equal share of the device budget."""

DISK = "disk"
"""Name of the store in files of the folder ``disk``."""
READ_BY_CPU = ("cpu", DISK)
"""Names of stores whose rows the CPU attends to, wherever queries are."""


def store_names() -> str:
    """Every value of the option ``store``, for messages and help."""
    return ", ".join([*STORES, SPLIT, DISK, "auto"])


class StoreChoice:
    """Makes the stores of one cache, all of the same type.

    With ``"auto"`` the lowest layer, the first to need a store, decides for all: split if there is
    a budget, else where there is room for all expected rows. Each layer gets an
    equal share of the budget, since a prompt comes layer by layer.

    Attributes:
        name: of the stores; None until ``"auto"`` has decided.
        reason: why ``"auto"`` decided so; None if it did not.
        announced_len: tokens of a prompt that was announced and has not ended; 0: none.
    """

    def __init__(self, options: RetrievalConfig, layers: int, all_to_first: float) -> None:
        """For a cache with these options and ``layers`` retrieval layers.

        Args:
            options: of the cache.
            layers: that retrieve.
            all_to_first: elements of a token in all these layers, in units of the first one's.

        Raises:
            ValueError: ``options.store`` is no store, or its folder is missing.
        """
        name = SPLIT if options.splits_rows else options.store
        if name not in ("auto", SPLIT, DISK, *STORES):
            raise ValueError(f"store={name!r}: choose one of {store_names()}")
        if name == DISK:
            check_folder(options.disk or "")
        self.name = None if name == "auto" else name
        self.reason: str | None = None
        self._options = options
        self._layers = layers
        self._all_to_first = all_to_first
        self._share: int | None = None
        self.announced_len, self._chunk = 0, 0
        self._prompt_len, self._new_tokens = 0, 0

    def expect(self, tokens: int, chunk: int, new_tokens: int = 0) -> None:
        """Announce a prompt of ``tokens`` tokens, ``chunk`` of them in a pass, and what follows.

        About ``new_tokens`` are generated after it; stores grow where there are more.
        """
        self.announced_len, self._chunk = tokens, chunk
        self._prompt_len, self._new_tokens = tokens, new_tokens

    def note_pass(self, tokens: int) -> None:
        """Note the start of a pass of ``tokens``: one token, or all expected, end the prompt.

        A prompt that nobody announced makes what was announced before it void.
        """
        if not self.announced_len and tokens > self._options.max_draft:
            self._prompt_len, self._new_tokens = 0, 0
        if tokens == 1 or tokens >= self.announced_len:
            self.announced_len, self._chunk = 0, 0

    def make(self, first: FirstRows) -> Store:
        """An empty store for a layer whose rows begin with ``first``.

        Raises:
            ValueError: a store that does not work on ``device``, a split one without a budget
                where none can be found.
        """
        device = first.device
        if self.name is None:
            final_len = self._prompt_len + self._new_tokens - self._options.recent
            tokens = max(first.tokens, final_len)
            rows_bytes = int(first.nbytes * tokens // first.tokens * self._all_to_first)
            self.name, self.reason = choose(device, rows_bytes, self._options)
        name = self.name
        if name != "device" and device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(f"store={name!r} on {device}: only store='device' works there")
        store: Store
        if name == SPLIT:
            if self._share is None:
                self._share = self._budget(device) // self._layers
            store = PagedStore(SplitMemory(device, self._share))
        elif name == DISK:
            assert self._options.disk is not None, "options are checked"
            store = DiskStore(device, self._options.disk)
        else:
            store = STORES[name](device, self._options)
        if self._chunk < self.announced_len:
            store.expect(self.announced_len)
        return store

    def _budget(self, device: torch.device) -> int:
        """Bytes of device memory for the rows of all layers."""
        if self._options.device_budget is not None:
            return byte_count(self._options.device_budget)
        free = free_bytes(device)
        if free is None:
            raise ValueError(
                f"store='split' on {device}: free memory is known on GPUs only; give "
                "device_budget, as device_budget='90GB'"
            )
        return free // 2
