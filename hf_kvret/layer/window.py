"""The window of one layer: sinks and recent tokens, dense, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.state import State, Tensors, number, tensor, transient
from hf_kvret_kernels.host_step import HostWindow
from hf_kvret_kernels.step_attention import NewToken

_STEP = 64


@dataclass(frozen=True)
class Capture:
    """Where the token of a captured step goes, in tensors that are refilled before each replay.

    Attributes:
        column: ``[1]`` int64, the column of the window that the token is written to.
        mask: ``[B, capacity]`` bool, the columns that the step attends to, the new one included.
        slots: ``[B, n]`` bool, the validity of all slots, as in ``Window.validity``, with room for
            later ones; None: nothing is padded.
    """

    column: torch.Tensor
    mask: torch.Tensor
    slots: torch.Tensor | None


def wide_mask(*parts: torch.Tensor) -> torch.Tensor:
    """``parts [B, n]`` beside each other, in rows that begin at multiples of 16 bytes.

    Kernels load them as wide as they can, and are not compiled anew for other lengths.
    """
    width = sum(part.shape[1] for part in parts)
    room = parts[0].new_empty(()).expand(len(parts[0]), -width % 16)
    return torch.cat([*parts, room], dim=1)[:, :width]


class Window(State):
    """The first ``sink`` valid tokens of each sequence, and the newest ones.

    One buffer holds both: columns ``0 .. sink`` are the sinks, the recent tokens follow. A sink
    is a copy of a token that has left the recent part; each sequence has its own (they may be
    padded on the left). ``sink_slots [B, sink]`` has their token indices, -1 for none yet.

    Attributes:
        padded: ``[B]``, whether a sequence begins with padding; None: none did, or it isn't known.
        value_in_key: Dv where values are the first numbers of keys, and not held; else 0.
        sinks_full: whether all sinks of all sequences are there.
        capture: set while a decode step is captured. Its tensors then say where the token goes and
            which columns count; whole buffers are read, so nothing captured depends on the length.
        host: describes the buffers to the CPU library; None where they are new to it.
    """

    keys: torch.Tensor = tensor(dims="B H c D")
    _values: torch.Tensor | None = tensor(key="values", optional=True, dims="B H c V")
    sink_slots: torch.Tensor = tensor(dims="B S", dtype=torch.int64)
    padded: torch.Tensor | None = tensor(optional=True, dims="B", dtype=torch.bool)
    start: int = number(0)
    length: int = number(0, saved=False)
    sinks_full: bool = number(False, saved=False)
    host: HostWindow | None = transient()
    _new: NewToken | None = transient()

    def __init__(
        self, sink: int, keys: torch.Tensor, values: torch.Tensor, value_in_key: int = 0
    ) -> None:
        """For tokens shaped like ``keys [B, Hkv, *, Dk]`` and ``values [B, Hkv, *, Dv]``."""
        batch, heads = keys.shape[:2]
        self.sink = sink
        self.value_in_key = value_in_key
        self.keys = keys.new_zeros(batch, heads, sink, keys.shape[-1])
        if not value_in_key:
            self._values = values.new_zeros(batch, heads, sink, values.shape[-1])
        self.sink_slots = torch.full((batch, sink), -1, dtype=torch.long, device=keys.device)
        self.sinks_full = sink == 0
        self.capture: Capture | None = None

    @property
    def values(self) -> torch.Tensor:
        """``[B, Hkv, capacity, Dv]``, the buffer or a view of that of the keys."""
        return self.keys[..., : self.value_in_key] if self._values is None else self._values

    @property
    def row_dim(self) -> int:
        """Numbers held of a token and KV head."""
        own = 0 if self._values is None else self._values.shape[3]
        return self.keys.shape[3] + own

    @property
    def capacity(self) -> int:
        """Columns of the buffer."""
        return self.keys.shape[2]

    @property
    def end(self) -> int:
        """Slot after the newest token."""
        return self.start + self.length

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add the newest tokens, ``[B, Hkv, n, D]``."""
        if self.capture is not None:
            self._new = NewToken(keys, values, self.capture.column)
            self.length += 1
            return
        # A captured step that broke off may have left its token.
        self._new = None
        first, count = self.sink + self.length, keys.shape[2]
        last = first + count
        if last > self.keys.shape[2]:
            self._rehouse(last + max(_STEP, last // 8))
        self.keys.narrow(2, first, count).copy_(keys)
        if self._values is not None:
            self._values.narrow(2, first, count).copy_(values)
        self.length += count

    def pop(self, count: int, valid: torch.Tensor | None) -> TokenBlock:
        """Take out the oldest ``count`` recent tokens. ``valid [B, T]`` covers all slots."""
        first, last = self.sink, self.sink + count
        keys = self.keys[:, :, first:last].clone()
        values = keys[..., : self.value_in_key]
        if self._values is not None:
            values = self._values[:, :, first:last].clone()
        rows_valid = None if valid is None else valid[:, self.start : self.start + count]
        block = TokenBlock(keys, values, self.start, rows_valid, value_in_key=self.value_in_key)
        rest = slice(last, self.sink + self.length)
        self.length -= count
        for buffer, _ in self._sides(self.keys, self.values):
            buffer[:, :, first : first + self.length] = buffer[:, :, rest].clone()
        self.start += count
        return block

    def skip(self, count: int) -> None:
        """Advance ``start`` by ``count`` tokens that went straight into the store."""
        assert not self.length, "recent tokens precede the skipped ones"
        self.start += count

    def unpop(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Make popped tokens ``[B, Hkv, n, D]``, which end before slot ``end``, recent again.

        The recent part must be empty. Sinks that were copied from these or later slots are freed.
        """
        assert not self.length, "the window still holds recent tokens"
        self.start = end - keys.shape[2]
        self.append(keys, values)
        self.sink_slots = self.sink_slots.masked_fill(self.sink_slots >= self.start, -1)
        self.sinks_full = self.sink == 0

    def fit(self, recent: int) -> None:
        """Resize to ``sink + recent`` tokens, the most there are between two flushes."""
        capacity = self.sink + max(recent, self.length)
        if self.keys.shape[2] != capacity:
            self._rehouse(capacity)

    def take_sinks(self, block: TokenBlock) -> None:
        """Copy the first valid tokens of ``block`` (just popped) into sinks that are free."""
        if self.sinks_full:
            return
        valid = block.valid
        if valid is None:
            valid = torch.ones((), dtype=torch.bool, device=block.keys.device)
            valid = valid.expand(len(self.sink_slots), len(block))
        sink_counts = (self.sink_slots >= 0).sum(dim=1, keepdim=True)
        # Sink s gets the first token up to which s + 1 tokens are valid.
        ranks = torch.arange(1, self.sink + 1, device=valid.device).expand_as(self.sink_slots)
        columns = torch.searchsorted(valid.long().cumsum(dim=1) + sink_counts, ranks.contiguous())
        is_new = (ranks > sink_counts) & (columns < len(block))
        columns = columns.clamp(max=len(block) - 1)
        for buffer, rows in self._sides(block.keys, block.values):
            indices = columns[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
            sinks = buffer[:, :, : self.sink]
            sinks.copy_(rows.gather(2, indices).where(is_new[:, None, :, None], sinks))
        self.sink_slots.copy_(torch.where(is_new, columns + block.start, self.sink_slots))
        # A block without padding and at least that long fills all sinks: no need to synchronize.
        whole = block.valid is None and len(block) >= self.sink
        self.sinks_full = whole or bool((self.sink_slots >= 0).all())

    def put_sinks(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the sinks among the rows ``[B, Hkv, n, D]`` of the first n slots."""
        for row, slots in enumerate(self.sink_slots.tolist()):
            columns = [i for i, slot in enumerate(slots) if 0 <= slot < keys.shape[2]]
            places = [slots[i] for i in columns]
            keys[row, :, places] = self.keys[row, :, columns]
            values[row, :, places] = self.values[row, :, columns]

    def recent(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the recent keys ``[B, Hkv, n, Dk]`` and values, oldest first."""
        part = slice(self.sink, self.sink + self.length)
        return self.keys[:, :, part], self.values[:, :, part]

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of sink + recent keys ``[B, Hkv, sink + n, Dk]`` and values.

        While a step is captured, the whole buffers; ``validity`` masks unused columns.
        """
        if self.capture is not None:
            new = self.take_new()
            if new is not None:
                for buffer, rows in self._sides(new.key, new.value):
                    buffer.index_copy_(2, new.column, rows)
            return self.keys, self.values
        part = slice(0, self.sink + self.length)
        return self.keys[:, :, part], self.values[:, :, part]

    def take_new(self) -> NewToken | None:
        """The token of a captured step, for a kernel that writes it where it attends to it.

        None where that is done.
        """
        new, self._new = self._new, None
        return new

    def validity(self, valid: torch.Tensor | None, past: int | None = None) -> torch.Tensor | None:
        """``[B, sink + n]`` bool for ``tokens()``, None when all are valid.

        ``valid [B, T]`` covers all slots up to ``end``; None means that all are valid. With
        ``past``, tokens from that slot on count as not valid.
        """
        if self.capture is not None:
            return self.capture.mask
        if valid is None and self.sinks_full and (past is None or past >= self.end):
            return None
        if past is not None:
            before = torch.arange(self.end, device=self.keys.device) < past
            valid = before.expand(len(self.sink_slots), -1) if valid is None else valid & before
        sinks = self.sink_slots >= 0
        batch = len(self.sink_slots)
        if valid is None:
            recent = torch.ones((), dtype=torch.bool, device=sinks.device)
            return wide_mask(sinks, recent.expand(batch, self.length))
        sinks = sinks & valid.gather(1, self.sink_slots.clamp(min=0))
        return wide_mask(sinks, valid[:, self.start : self.end])

    def on_host(self, valid: torch.Tensor | None) -> HostWindow:
        """The window as the compiled library takes it; ``valid`` as in ``validity``."""
        host = self.host
        if host is None or host.keys is not self.keys:
            host = self.host = HostWindow(self.keys, self.values, 0)
        host.length = self.sink + self.length
        host.valid = None if valid is None and self.sinks_full else self.validity(valid)
        return host

    def crop(self, length: int) -> None:
        """Drop recent tokens from slot ``length`` on; sinks, which are older, stay."""
        self.length = max(0, min(self.length, length - self.start))

    def state_dict(self) -> Tensors:
        """As for every state, without spare capacity."""
        keys, values = self.tokens()
        state = super().state_dict() | {"keys": keys.contiguous()}
        return state if self.value_in_key else state | {"values": values.contiguous()}

    def loaded(self) -> None:
        self.sink = self.sink_slots.shape[1]
        self.length = self.keys.shape[2] - self.sink
        self.sinks_full = bool((self.sink_slots >= 0).all())

    @torch.inference_mode(False)
    def _rehouse(self, capacity: int) -> None:
        """Copy the tokens to new buffers for ``capacity`` tokens, to be written to in any mode."""
        length, self.host = self.sink + self.length, None
        for name in ("keys", "_values"):
            if (buffer := getattr(self, name)) is not None:
                larger = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3])
                larger[:, :, :length] = buffer[:, :, :length]
                setattr(self, name, larger)

    def _sides(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each buffer, with what belongs into it of ``keys`` and ``values``."""
        yield self.keys, keys
        if self._values is not None:
            yield self._values, values
