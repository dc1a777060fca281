"""SlotBuffer: rows on the device for those tokens that are in use, and which token lies where."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

import torch

from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.resident import SlotMap, assign, fetch

_TABLE_STEP = 1024
_EMPTY = -1


@dataclass(eq=False)
class SlotBuffer:
    """S slots for each KV head of each batch row; a slot holds a key and its value.

    Attributes:
        held: ``[B, Hkv, S, Dk + Dv]``, the rows.
        slot_map: which token lies in which slot.
        key_dim: Dk.
        requests, misses: 0-dim int64 on the device, rows asked for and rows fetched.
    """

    held: torch.Tensor
    slot_map: SlotMap
    key_dim: int
    requests: torch.Tensor
    misses: torch.Tensor
    _rows: PagedRows | None = field(default=None, init=False, repr=False)

    @classmethod
    def empty(cls, rows: PagedRows, slots: int) -> Self:
        """A buffer of ``slots`` for what is fetched from ``rows``."""
        lead, device = (rows.table.shape[0], rows.heads), rows.table.device

        def numbers(*shape: int) -> torch.Tensor:
            return torch.full(shape, _EMPTY, dtype=torch.int32, device=device)

        clock = torch.zeros(1, dtype=torch.int32, device=device)
        slot_map = SlotMap(numbers(*lead, 0), numbers(*lead, slots), numbers(*lead, slots), clock)
        held = torch.empty(*lead, slots, rows.width, dtype=rows.dtype, device=device)
        counts = [torch.zeros((), dtype=torch.long, device=device) for _ in range(2)]
        return cls(held, slot_map, rows.key_dim, *counts)

    @property
    def slots(self) -> int:
        """S."""
        return self.held.shape[2]

    @property
    def row_bytes(self) -> int:
        """Of a key and its value."""
        return self.held.shape[3] * self.held.element_size()

    @property
    def rows(self) -> PagedRows:
        """The slots as rows: one page for each batch row, in which a slot is a token."""
        if self._rows is None or self._rows.chunks[0] is not self.held:
            pages = torch.arange(len(self.held), dtype=torch.int32, device=self.held.device)
            self._rows = PagedRows([self.held], pages[:, None], self.key_dim)
        return self._rows

    def bring(self, rows: PagedRows, ids: torch.Tensor) -> torch.Tensor:
        """Fetch what is missing of ``ids [B, H, Q, k]`` from ``rows``; returns everyone's slots.

        H is Hkv or a multiple. The slots, in the shape of ids, hold until the next call.
        """
        wanted = ids.reshape(*self.held.shape[:2], -1)
        places, fetched = assign(self.slot_map, wanted)
        fetch(rows, wanted, fetched, self.held)
        self.requests += (wanted >= 0).sum()
        self.misses += (fetched >= 0).sum()
        return places.view(ids.shape)

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of ``ids [B, H, Q, k]``, -1 for tokens that are not here."""
        wanted = ids.reshape(*self.held.shape[:2], -1)
        places = self.slot_map.table.gather(2, wanted.clamp(min=0).long())
        return places.masked_fill(wanted < 0, _EMPTY).view(ids.shape)

    def cover(self, tokens: int) -> None:
        """Let the table reach over ``tokens``."""
        table = self.slot_map.table
        missing = tokens - table.shape[2]
        if missing > 0:
            step = max(missing, _TABLE_STEP, tokens // 16)
            longer = torch.nn.functional.pad(table, (0, step), value=_EMPTY)
            self.slot_map = dataclasses.replace(self.slot_map, table=longer)

    def widen(self, slots: int) -> None:
        """Make it ``slots`` slots, at least as many as there are."""
        more = slots - self.slots
        self.held = torch.nn.functional.pad(self.held, (0, 0, 0, more))
        token, stamp = (
            torch.nn.functional.pad(old, (0, more), value=_EMPTY)
            for old in (self.slot_map.token, self.slot_map.stamp)
        )
        self.slot_map = dataclasses.replace(self.slot_map, token=token, stamp=stamp)

    def forget(self, cold_len: int) -> None:
        """Free the slots of tokens from ``cold_len`` on."""
        gone = self.slot_map.token >= cold_len
        self.slot_map.token.masked_fill_(gone, _EMPTY)
        self.slot_map.stamp.masked_fill_(gone, _EMPTY)
        self.slot_map.table[:, :, cold_len:] = _EMPTY

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        old = self.slot_map
        self.slot_map = SlotMap(
            table=old.table.index_select(0, rows),
            token=old.token.index_select(0, rows),
            stamp=old.stamp.index_select(0, rows),
            clock=old.clock,
        )
        self.held = self.held.index_select(0, rows)

    def fork(self) -> Self:
        """An independent copy, whose counts start anew."""
        old = self.slot_map
        slot_map = SlotMap(
            table=old.table.clone(),
            token=old.token.clone(),
            stamp=old.stamp.clone(),
            clock=old.clock.clone(),
        )
        counts = torch.zeros_like(self.requests), torch.zeros_like(self.misses)
        return type(self)(self.held.clone(), slot_map, self.key_dim, *counts)

    def nbytes(self) -> int:
        """Of rows and maps, spare room included."""
        slot_map = self.slot_map
        tensors = (self.held, slot_map.table, slot_map.token, slot_map.stamp)
        return sum(tensor.nbytes for tensor in tensors)
