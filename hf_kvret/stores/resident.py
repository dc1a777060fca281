"""ResidentStore: rows in host memory, with a cache of slots on the device, the SlotBuffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import torch

from hf_kvret.contracts.signals import SIGNALS_WAIT
from hf_kvret.contracts.state import State, part, tensor, transient
from hf_kvret.contracts.store import AttentionResult
from hf_kvret.stores.memory import HostMemory
from hf_kvret.stores.paged import PagedStore, WrappedStore
from hf_kvret_kernels.gather_attention import gather_partials
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.resident import SlotMap, assign, fetch

_TABLE_STEP = 1024
_EMPTY = -1


class SlotBuffer(State):
    """A cache of rows on the device: S slots for each KV head of each sequence.

    A slot holds a key and its value.

    Attributes:
        memory: ``[B, Hkv, S, width]``, the rows.
        key_dim: Dk.
        value_in_key: see ``PagedRows``.
        counts: ``[3]`` int64 on the device, see ``SlotMap``.
    """

    memory: torch.Tensor = tensor(saved=False)
    # The slot map says which token lies in which slot.
    _table: torch.Tensor = tensor(saved=False)
    _token: torch.Tensor = tensor(saved=False)
    _stamp: torch.Tensor = tensor(saved=False)
    _clock: torch.Tensor = tensor(saved=False, batched=False)
    counts: torch.Tensor = tensor(saved=False, batched=False)

    def __init__(self, rows: PagedRows, slots: int) -> None:
        """An empty buffer of ``slots`` for rows fetched from ``rows``."""
        lead, device = (rows.table.shape[0], rows.heads), rows.table.device
        self.memory = torch.empty(*lead, slots, rows.width, dtype=rows.dtype, device=device)
        self.key_dim, self.value_in_key = rows.key_dim, rows.value_in_key
        self._table, self._token, self._stamp = (
            torch.full((*lead, count), _EMPTY, dtype=torch.int32, device=device)
            for count in (0, slots, slots)
        )
        self._clock = torch.zeros(1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(3, dtype=torch.long, device=device)
        self._rows: PagedRows | None = None

    @property
    def slot_map(self) -> SlotMap:
        """Which token lies in which slot."""
        return SlotMap(self._table, self._token, self._stamp, self._clock, self.counts)

    @property
    def slots(self) -> int:
        """S."""
        return self.memory.shape[2]

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and its value."""
        return self.memory.shape[3] * self.memory.element_size()

    @property
    def rows(self) -> PagedRows:
        """The slots as rows: one page for each sequence, in which a slot is a token."""
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
        slots, fetch_slots = assign(self.slot_map, tokens, tokens=rows.token_count)
        fetch(rows, tokens, fetch_slots, self.memory)
        return slots.view(ids.shape)

    @torch.inference_mode(False)
    def cover(self, tokens: int) -> None:
        """Grow the table to at least ``tokens``; it can be written to in and out of inference."""
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
        """As every state's; counts start at 0."""
        twin = super().fork()
        twin.counts.zero_()
        twin._rows = None
        return twin


class ResidentStore(WrappedStore):
    """A hit/miss buffer in front of a host store (LRQK, sections 4.1 and 4.3).

    Each KV head has slots on the device. Selected rows that are in a slot are read there; the
    others are fetched over the bus, into the least recently used slots. With more slots than a
    query selects, rows stay for a while after their last use. The host has every row, so nothing
    is written back, and the host thread never waits.

    Query heads of a group that select for themselves pool their slots. Many queries at once are
    served in groups whose selections fit into the slots.

    Args:
        device: where queries are.
        slots: rows for each head that selects: a count (int), or a multiple of what a query
            selects (float).
    """

    # A store that was just loaded has none.
    _buffer: SlotBuffer | None = part(saved=False, optional=True)
    # The rows of which the buffer has served a step; others come when these change.
    _served: PagedRows | None = transient()

    def __init__(self, device: torch.device, slots: int | float = 1.0) -> None:
        super().__init__(PagedStore(HostMemory(device)))
        self.slots = slots

    def key_chunks(self, chunk_len: int = 4096) -> Iterator[tuple[int, torch.Tensor]]:
        return self.rows.key_chunks(chunk_len)

    def begin(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> Callable[[], AttentionResult]:
        rows = self.rows.paged_rows()
        share, count = ids.shape[1] // rows.heads, max(1, ids.shape[3])
        buffer = self._roomy_buffer(rows, share, count)
        at_once = buffer.slots // (share * count)
        attend = partial(gather_partials, scale=scale, softcap=softcap)
        try:
            with SIGNALS_WAIT:
                results = [
                    attend(q, buffer.rows, buffer.bring(rows, i))
                    for q, i in zip(*(x.split(at_once, dim=2) for x in (query, ids)), strict=True)
                ]
        except BaseException:
            # Slots may name rows that were not fetched.
            self._buffer, self._served = None, None
            raise
        self._served = rows
        if len(results) == 1:
            return results[0]
        outs, lses = zip(*(chunks() for chunks in results), strict=True)
        return Partials.whole(torch.cat(outs, 2), torch.cat(lses, 2))

    def scores(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> torch.Tensor:
        """As for every store; reads the host's rows and is not counted as requests."""
        return self.rows.scores(query, ids, scale, softcap)

    def stats(self) -> dict[str, Any]:
        """``hits``, ``misses``, ``miss_ratio`` and ``bytes_missed`` since made or forked.

        A miss is a row that was fetched; every other request is a hit, also the second one in
        the same step for a row that was missing.
        """
        buffer = self._buffer
        requests, misses = (0, 0) if buffer is None else buffer.counts[:2].tolist()
        return {
            "hits": requests - misses,
            "misses": misses,
            "miss_ratio": misses / requests if requests else 0.0,
            "bytes_missed": misses * (0 if buffer is None else buffer.row_bytes),
        }

    @property
    def capture_obstacle(self) -> str | None:
        """The slots must have served a step since rows came, went or were reordered.

        The first such step may enlarge the slots and their table. Captured, it would do so at every
        replay, and lose the contents.
        """
        if len(self) and self._served is self.rows.paged_rows():
            return None
        return "the slots of store='resident' have served no step since its rows changed"

    @torch.inference_mode(False)
    def _roomy_buffer(self, rows: PagedRows, share: int, count: int) -> SlotBuffer:
        """The buffer, with room for ``count`` rows of each of the ``share`` heads of a KV head.

        Made outside inference mode, so that it can be written to in and out of it.
        """
        slots = math.ceil(self.slots * count) if isinstance(self.slots, float) else self.slots
        if slots < count:
            raise ValueError(
                f"slots={slots}, and a query selects {count} rows, which must fit into them: raise "
                "slots, or pass a multiple of the budget, as slots=1.0"
            )
        if self._buffer is None:
            self._buffer = SlotBuffer(rows, slots * share)
        elif self._buffer.slots < slots * share:
            self._buffer.widen(slots * share)
        self._buffer.cover(len(self))
        return self._buffer
