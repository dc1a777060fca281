"""Memory from before a capture that its graph reads and writes: addresses, not tensors."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .simulation import active, site


@dataclass
class _Input:
    """One memory.

    Attributes:
        memory: dead once it was freed.
        alias: the same addresses, which keep nothing alive.
        site: lines of the library that used it in the capture.
    """

    memory: weakref.ref[Any]
    alias: Any
    site: str


@dataclass
class Inputs:
    """The inputs of one capture, whose caller has to keep the tensors that replays need."""

    _all: list[_Input] = field(default_factory=list)
    # The newest one that begins at an address.
    _by_address: dict[int, _Input] = field(default_factory=dict)

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` for replays, which does not keep its memory.

        Other memory of the host is used by the host, at the capture: that is returned as it is.
        """
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            memory = tensor.untyped_storage()
            on_device = active().device_of(tensor).type == "cuda"
            if not memory.nbytes() or not (on_device or active().is_pinned(tensor)):
                return tensor
            form = tensor.storage_offset(), tensor.shape, tensor.stride()
            alias: torch.Tensor = tensor.new_empty(0).detach()
            return alias.set_(self._alias_of(memory), *form)

    def check(self) -> None:
        """SimulationError where some was freed, which a GPU would read as it is by now."""
        for each in self._all:
            if each.memory() is None:
                raise active().fault(
                    "stale", f"a replay uses memory that was freed, captured at [{each.site}]"
                )

    def _alias_of(self, memory: Any) -> Any:
        address = memory.data_ptr()
        entry = self._by_address.get(address)
        if entry is None or entry.memory() is not memory:
            buffer = (ctypes.c_char * memory.nbytes()).from_address(address)
            alias: Any = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
            # Its device and its log.
            vars(alias).update(vars(memory))
            entry = self._by_address[address] = _Input(weakref.ref(memory), alias, site())
            self._all.append(entry)
        return entry.alias
