"""Where cold keys and values live, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_kvret.contracts.store import FirstRows, Store as Store
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.stores.cpu import CpuStore as CpuStore, DiskStore as DiskStore
from hf_kvret.stores.memory import DeviceMemory, HostMemory, PageMemory, check_folder
from hf_kvret.stores.paged import PagedStore as PagedStore
from hf_kvret.stores.placement import UNCODED, choose
from hf_kvret.stores.quantized import QuantizedStore as QuantizedStore
from hf_kvret.stores.resident import ResidentStore as ResidentStore

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


DISK = "disk"
"""Name of the store in files of the folder ``disk``."""
READ_BY_CPU = ("cpu", DISK)
"""Names of stores whose rows the CPU attends to, wherever queries are."""


def store_names() -> str:
    """Every value of the option ``store``, for messages and help."""
    return ", ".join([*STORES, DISK, "auto"])


class StoreChoice:
    """Makes the stores of one cache, all of the same type.

    With ``"auto"`` the lowest layer, the first to need a store, decides for all: where there is
    room for all expected rows.

    Attributes:
        name: of the stores; None until ``"auto"`` has decided.
        reason: why ``"auto"`` decided so; None if it did not.
        announced_len: tokens of a prompt that was announced and has not ended; 0: none.
    """

    def __init__(self, options: RetrievalConfig, all_to_first: float) -> None:
        """For a cache with these options.

        Args:
            options: of the cache.
            all_to_first: elements of a token in all retrieval layers, in units of the first one's.

        Raises:
            ValueError: ``options.store`` is no store, or its folder is missing.
        """
        name = options.store
        if name not in ("auto", DISK, *STORES):
            raise ValueError(f"store={name!r}: choose one of {store_names()}")
        if name == DISK:
            check_folder(options.disk or "")
        self.name = None if name == "auto" else name
        self.reason: str | None = None
        self._options = options
        self._all_to_first = all_to_first
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
            ValueError: a store that does not work on ``device``.
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
        if name == DISK:
            assert self._options.disk is not None, "options are checked"
            store = DiskStore(device, self._options.disk)
        else:
            store = STORES[name](device, self._options)
        if self._chunk < self.announced_len:
            store.expect(self.announced_len)
        return store
