"""SlotBuffer: a cache of rows on the device, and the map from tokens to its slots."""

from __future__ import annotations

from typing import Self

import torch

from hf_kvret.contracts.state import State, tensor
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.resident import SlotMap, assign, fetch

_TABLE_STEP = 1024
_EMPTY = -1


class SlotBuffer(State):
    """S slots for each KV head of each batch row; a slot holds a key and its value.

    Attributes:
        memory: ``[B, Hkv, S, width]``, the rows.
        key_dim: Dk.
        value_in_key: see ``PagedRows``.
        requests, misses: 0-dim int64 on the device, rows asked for and rows fetched.
    """

    memory: torch.Tensor = tensor(saved=False)
    # Of the slot map: which token lies in which slot.
    _table: torch.Tensor = tensor(saved=False)
    _token: torch.Tensor = tensor(saved=False)
    _stamp: torch.Tensor = tensor(saved=False)
    _clock: torch.Tensor = tensor(saved=False, batched=False)
    requests: torch.Tensor = tensor(saved=False, batched=False)
    misses: torch.Tensor = tensor(saved=False, batched=False)

    def __init__(
        self, memory: torch.Tensor, slot_map: SlotMap, key_dim: int, value_in_key: int = 0
    ) -> None:
        self.memory, self.key_dim, self.value_in_key = memory, key_dim, value_in_key
        self._table, self._token = slot_map.table, slot_map.token
        self._stamp, self._clock = slot_map.stamp, slot_map.clock
        self.requests, self.misses = (
            torch.zeros((), dtype=torch.long, device=memory.device) for _ in range(2)
        )
        self._rows: PagedRows | None = None

    @classmethod
    def empty(cls, rows: PagedRows, slots: int) -> Self:
        """An empty buffer of ``slots`` for rows fetched from ``rows``."""
        lead, device = (rows.table.shape[0], rows.heads), rows.table.device

        def numbers(*shape: int) -> torch.Tensor:
            return torch.full(shape, _EMPTY, dtype=torch.int32, device=device)

        clock = torch.zeros(1, dtype=torch.int32, device=device)
        slot_map = SlotMap(numbers(*lead, 0), numbers(*lead, slots), numbers(*lead, slots), clock)
        memory = torch.empty(*lead, slots, rows.width, dtype=rows.dtype, device=device)
        return cls(memory, slot_map, rows.key_dim, rows.value_in_key)

    @property
    def slot_map(self) -> SlotMap:
        """Which token lies in which slot."""
        return SlotMap(self._table, self._token, self._stamp, self._clock)

    @property
    def slots(self) -> int:
        """S."""
        return self.memory.shape[2]

    @property
    def row_bytes(self) -> int:
        """Of a key and its value."""
        return self.memory.shape[3] * self.memory.element_size()

    @property
    def rows(self) -> PagedRows:
        """The slots as rows: one page for each batch row, in which a slot is a token."""
        if self._rows is None or self._rows.chunks[0] is not self.memory:
            pages = torch.arange(len(self.memory), dtype=torch.int32, device=self.memory.device)
            self._rows = PagedRows(
                [self.memory], pages[:, None], self.key_dim, value_in_key=self.value_in_key
            )
        return self._rows

    def bring(self, rows: PagedRows, ids: torch.Tensor) -> torch.Tensor:
        """Fetch the rows of ``ids [B, H, Q, k]`` that are missing; returns the slots of all ids.

        H is Hkv or a multiple. The slots, in the shape of ids, are valid until the next call.
        """
        tokens = ids.reshape(*self.memory.shape[:2], -1)
        places, fetch_slots = assign(self.slot_map, tokens, tokens=rows.token_count)
        fetch(rows, tokens, fetch_slots, self.memory)
        self.requests += (places >= 0).sum()
        self.misses += (fetch_slots >= 0).sum()
        return places.view(ids.shape)

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of ``ids [B, H, Q, k]``, -1 for tokens without one and for what is none."""
        tokens, room = ids.reshape(*self.memory.shape[:2], -1), self._table.shape[2]
        outside = (tokens < 0) | (tokens >= room)
        places = self._table.gather(2, tokens.masked_fill(outside, 0).long())
        return places.masked_fill(outside, _EMPTY).view(ids.shape)

    def cover(self, tokens: int) -> None:
        """Grow the table to at least ``tokens``."""
        table = self._table
        shortfall = tokens - table.shape[2]
        if shortfall > 0:
            step = max(shortfall, _TABLE_STEP, tokens // 16)
            self._table = torch.nn.functional.pad(table, (0, step), value=_EMPTY)

    def widen(self, slots: int) -> None:
        """Grow to ``slots`` slots; never fewer than now."""
        more = slots - self.slots
        self.memory = torch.nn.functional.pad(self.memory, (0, 0, 0, more))
        self._token, self._stamp = (
            torch.nn.functional.pad(old, (0, more), value=_EMPTY)
            for old in (self._token, self._stamp)
        )

    def crop(self, length: int) -> None:
        """Free the slots of tokens from ``length`` on."""
        mask = self._token >= length
        self._token.masked_fill_(mask, _EMPTY)
        self._stamp.masked_fill_(mask, _EMPTY)
        self._table[:, :, length:] = _EMPTY

    def fork(self) -> Self:
        """As every state's; counts start anew."""
        twin = super().fork()
        twin.requests.zero_()
        twin.misses.zero_()
        twin._rows = None
        return twin
