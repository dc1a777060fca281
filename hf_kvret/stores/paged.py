"""PagedStore: rows in pages, found through a page table.

A row is a key followed by its value. Pages hold ``page_len`` consecutive tokens of every KV
head; the table says which pages hold the tokens of which sequence. Reordering beams and
forking a cache touch the table alone, and growing never moves a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Self

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.state import Tensors, part
from hf_kvret.contracts.store import PAGES, AttentionResult, RowChunks, Store
from hf_kvret.stores.chunks import BUS_PROGRAMS, read_ahead, reading_stream
from hf_kvret.stores.memory import PageMemory
from hf_kvret_kernels.gather_attention import gather_partials, gather_scores
from hf_kvret_kernels.paged import PagedRows, copy_pages, join_sides, lay_apart, select


class PagedStore(Store):
    """Full-precision rows in the pages of a ``PageMemory``.

    Pages are written once and freed with the store only. A sequence or fork that may share the
    last, partial page copies it before writing. So the operations of ``State`` can't be derived
    from its fields.

    Args:
        memory: where pages lie.
        page_len: tokens of a page.
        apart: the keys of a page's head lie before its values, see ``PagedRows``.
    """

    capture_obstacle = None

    def __init__(self, memory: PageMemory, page_len: int = 64, *, apart: bool = False) -> None:
        self.memory = memory
        self.page_len = page_len
        self._apart = apart
        self.reset()

    def reset(self) -> None:
        self.length = 0
        self._chunks: list[torch.Tensor] = []
        self._free_pages = 0
        self._own_pages = 0
        self._expected_len = 0
        self._table: torch.Tensor | None = None
        self._tail: torch.Tensor | None = None
        self._key_dim = self._value_in_key = 0
        self._rows: PagedRows | None = None
        self._addresses: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.length

    @property
    def over_bus(self) -> bool:
        return self.memory.over_bus and bool(self._chunks)

    def expect(self, tokens: int) -> None:
        self._expected_len = tokens

    def append(self, block: TokenBlock) -> None:
        if block.start != self.length:
            raise ValueError(f"block starts at slot {block.start}, the store ends at {self.length}")
        if len(block) == 0:
            return
        self._value_in_key = block.value_in_key
        in_key = block.value_in_key > 0
        rows = block.keys if in_key else torch.cat([block.keys, block.values], dim=-1)
        self._key_dim = block.keys.shape[-1]
        offset = self.length % self.page_len
        if offset and self._tail is not None:
            count = min(self.page_len - offset, rows.shape[2])
            self._write_tail(self._tail, offset, rows[:, :, :count])
            rows = rows[:, :, count:]
        elif offset:
            column = self.length // self.page_len
            partial = self._dense(column, column + 1)[:, :, :offset]
            rows = torch.cat([partial.to(rows.device), rows], dim=2)
        if rows.shape[2]:
            self._add_pages(rows, column=-(-(block.end - rows.shape[2]) // self.page_len))
        self.length = block.end

    def begin(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> Callable[[], AttentionResult]:
        return gather_partials(query, self.paged_rows(), ids, scale=scale, softcap=softcap)

    def host_rows(self) -> PagedRows | None:
        rows = self.paged_rows()
        return rows if rows.table.is_cpu else None

    def scores(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> torch.Tensor:
        return gather_scores(query, self.paged_rows(), ids, scale=scale, softcap=softcap)

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.paged_rows().gather(ids)

    def chunks(
        self, chunk_len: int = 4096, stop: int | None = None, device: torch.device | None = None
    ) -> RowChunks:
        """As for every store; over a bus, the next chunk is read while this one is in use.

        ``device``: where chunks go; None for the page table's device.
        """
        chunks = self._read_chunks(chunk_len, stop, device)
        # `map` holds no chunk while the next one is made, as a loop would.
        return map(lambda chunk: (chunk[0], *self._split(chunk[1])), chunks)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and values of ``rows [B, Hkv, n, width]``."""
        start, end = (0, self._value_in_key) if self._value_in_key else (self._key_dim, None)
        return rows[..., : self._key_dim], rows[..., start:end]

    def key_chunks(self, chunk_len: int = 4096) -> Iterator[tuple[int, torch.Tensor]]:
        return self._read_chunks(chunk_len, width=self._key_dim)

    def _read_chunks(
        self,
        chunk_len: int,
        stop: int | None = None,
        device: torch.device | None = None,
        width: int | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """``(start slot, [B, Hkv, n, width])``: the first ``width`` elements of rows, None for all.

        Arguments as of ``chunks``.
        """
        end = self.length if stop is None else min(stop, self.length)
        if not end:
            return iter(())
        step, count = max(1, chunk_len // self.page_len), -(-end // self.page_len)
        spans = [(first, min(first + step, count)) for first in range(0, count, step)]
        paged, stream, programs = self._current_rows(), None, None
        if device is not None and device != paged.table.device:
            table = paged.table.to(device)
            paged = replace(paged, table=table, page_address=None)
        if self.memory.over_bus and paged.table.is_cuda:
            stream, programs = reading_stream(paged.table.device), BUS_PROGRAMS
            # Allocated on the current stream, but read on the reading stream.
            for table in (paged.table, paged.addresses()):
                table.record_stream(stream)

        def read(first: int, last: int) -> torch.Tensor:
            self.memory.wait()
            return copy_pages(paged, first, last, width=width, programs=programs)

        def cut(chunk: tuple[int, torch.Tensor]) -> tuple[int, torch.Tensor]:
            start = chunk[0] * self.page_len
            return start, chunk[1][:, :, : end - start]

        return map(cut, read_ahead(read, spans, stream))

    def reorder(self, rows: torch.Tensor) -> None:
        if self._table is not None:
            self._table = self._table.index_select(0, rows.to(self._table.device))
            # The expected length was for other sequences.
            self._tail, self._expected_len = None, 0
            self._forget_rows()

    def crop(self, length: int) -> None:
        if length < self.length:
            self.length, self._tail = length, None

    def fork(self) -> Self:
        twin = type(self)(self.memory, self.page_len, apart=self._apart)
        twin.length, twin._key_dim = self.length, self._key_dim
        twin._value_in_key = self._value_in_key
        twin._chunks, twin._table, twin._rows = list(self._chunks), self._table, self._rows
        return twin

    def nbytes(self) -> int:
        """Bytes of pages and table. Pages shared with a fork count in both."""
        table = 0 if self._table is None else self._table.nbytes
        return sum(chunk.nbytes for chunk in self._chunks) + table

    def host_nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks) if self.memory.on_host else 0

    def before_capture(self) -> None:
        self.memory.synchronize()
        if self._table is not None and self._table.is_cuda:
            # Made now: made within a captured step, they would exist only after its first replay.
            self.paged_rows().addresses()

    def state_dict(self) -> Tensors:
        """Rows in pages, see ``PAGES``: a load may map them, and kernels read them as they lie."""
        if self.length == 0:
            return {}
        if self._apart:
            return self.dense_state()
        pages = self._pages_of(0, self._page_count, torch.device("cpu"))
        # Slots behind the last token may hold tokens that were dropped, which are not saved.
        pages[:, -1, :, self.length - self._page_count * self.page_len or self.page_len :] = 0
        state = {PAGES: pages, "length": torch.tensor(self.length)}
        state["key_dim"] = torch.tensor(self._key_dim)
        if self._value_in_key:
            state["value_in_key"] = torch.tensor(self._value_in_key)
        return state

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        """As for every store; pages in memory that can be ours are taken as they are."""
        pages = state.get(PAGES)
        fits = pages is not None and not self._apart and pages.shape[3] == self.page_len
        if pages is None or not fits or not self.memory.takes(pages):
            super().load_state_dict(state, device)
            return
        self._key_dim, self.length = int(state["key_dim"]), int(state["length"])
        self._value_in_key = int(state.get("value_in_key", 0))
        batch, columns = pages.shape[:2]
        self._chunks, self._own_pages = [pages.flatten(0, 1)], batch * columns
        ids = torch.arange(batch * columns, dtype=torch.int32, device=self.memory.device)
        self._table = ids.view(batch, columns)

    def dense_state(self) -> Tensors:
        """``keys [B, Hkv, n, Dk]``, ``values [B, Hkv, n, Dv]`` (or ``value_in_key``), for codes."""
        if self.length == 0:
            return {}
        rows = self._dense(0, self._page_count, torch.device("cpu"))[:, :, : self.length]
        keys, values = self._split(rows)
        if self._value_in_key:
            return {"keys": keys.contiguous(), "value_in_key": torch.tensor(self._value_in_key)}
        return {"keys": keys.contiguous(), "values": values.contiguous()}

    @property
    def _page_count(self) -> int:
        return -(-self.length // self.page_len)

    def paged_rows(self) -> PagedRows:
        """The rows as kernels read them, after waiting for earlier writes.

        Valid until the next change of the store. RuntimeError for an empty one.
        """
        self.memory.wait()
        return self._current_rows()

    def _current_rows(self) -> PagedRows:
        """``paged_rows`` without waiting for earlier writes."""
        if self._table is None:
            raise RuntimeError("the store is empty: append first")
        rows = self._rows
        if rows is None or rows.tokens != self.length:
            # Not changed in place: a fork may share it.
            rows = self._rows = PagedRows(
                self._chunks,
                self._table,
                self._key_dim,
                self._addresses if rows is None else rows.page_address,
                self._apart,
                self._value_in_key,
                self.length,
                self.memory.in_files,
            )
        return rows

    def _dense(self, first: int, last: int, device: torch.device | None = None) -> torch.Tensor:
        """Table columns ``first .. last`` as rows ``[B, Hkv, n, W]`` on ``device``.

        None is where queries are.
        """
        pages = self._pages_of(first, last, device or self.memory.device)
        if self._apart:
            pages = join_sides(pages, self._key_dim)
        return pages.transpose(1, 2).flatten(2, 3)

    def _pages_of(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Table columns ``first .. last``, ``[B, last - first, Hkv, page_len, W]``; a copy."""
        if self._table is None:
            raise RuntimeError("the store is empty: append first")
        self.memory.wait()
        if self.memory.device.type == "cuda" and self.memory.over_bus:
            torch.cuda.current_stream(self.memory.device).synchronize()
        table = self._table[:, first:last]
        pages = select(self._chunks, table.reshape(-1).long(), device)
        return pages.view(*table.shape, *pages.shape[1:])

    def _write_tail(self, page: torch.Tensor, offset: int, rows: torch.Tensor) -> None:
        """Write ``rows [B, Hkv, n, W]`` to the slots of ``page [B, Hkv, page_len, W]`` from one."""
        slots = slice(offset, offset + rows.shape[2])
        if not self._apart:
            self.memory.write(page[:, :, slots], rows)
            return
        first = self.page_len * self._key_dim
        targets = page.flatten(2).tensor_split([first], dim=2)
        sources = rows.tensor_split([self._key_dim], dim=-1)
        for target, source in zip(targets, sources, strict=True):
            self.memory.write(target.unflatten(2, (self.page_len, -1))[:, :, slots], source)

    def _add_pages(self, rows: torch.Tensor, column: int) -> None:
        """Write ``rows [B, Hkv, n, W]`` to new pages, from table column ``column`` on."""
        batch, heads, _, width = rows.shape
        self._forget_rows()
        table = [] if self._table is None else [self._table[:, :column]]
        while rows.shape[2]:
            page_count = -(-rows.shape[2] // self.page_len)
            first, pages = self._allocate(
                batch, batch * page_count, (heads, self.page_len, width), rows.dtype
            )
            columns = len(pages) // batch
            block, rows = rows.tensor_split([columns * self.page_len], dim=2)
            pad_len = columns * self.page_len - block.shape[2]
            padded = torch.nn.functional.pad(block, (0, 0, 0, pad_len))
            by_page = padded.view(batch, heads, columns, self.page_len, width).transpose(1, 2)
            if self._apart:
                by_page = lay_apart(by_page, self._key_dim)
            self.memory.write(pages, by_page.reshape(pages.shape))
            self._tail = pages.view(batch, columns, *pages.shape[1:])[:, -1]
            # Made on the device: a copy from the host would wait for it.
            page_ids = torch.arange(
                first, first + len(pages), dtype=torch.int32, device=self.memory.device
            )
            table.append(page_ids.view(batch, columns))
        self._table = torch.cat(table, dim=1)

    def _forget_rows(self) -> None:
        """Drop the cached ``PagedRows`` before the table changes; page addresses stay valid."""
        if self._rows is not None and self._rows.page_address is not None:
            self._addresses = self._rows.page_address
        self._rows = None

    def _allocate(
        self, least: int, pages: int, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> tuple[int, torch.Tensor]:
        """Number of the first of ``pages`` consecutive new pages, and the view of them.

        There may be fewer, a multiple of ``least``, where the newest chunk has no room for all.
        """
        if self._free_pages < least:
            self._add_chunk(least, pages, shape, dtype)
        chunk, pages = self._chunks[-1], min(pages, self._free_pages // least * least)
        start = len(chunk) - self._free_pages
        self._free_pages -= pages
        first = sum(len(other) for other in self._chunks[:-1]) + start
        return first, chunk[start : start + pages]

    def _add_chunk(
        self, least: int, pages: int, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        """A chunk with room for ``pages`` pages of ``shape``, ``least`` of them for each column.

        The first chunk has exactly the size of the prompt, or the expected size; later ones have
        at least an eighth of the pages made so far, so that there are few. A fork starts from 0.
        """
        expected = least * -(-self._expected_len // self.page_len)
        shortfall = expected - self._own_pages
        size = max(pages, shortfall if shortfall > 0 else self._own_pages // 8)
        chunk = self.memory.allocate((size, *shape), dtype)
        self._own_pages += len(chunk)
        self._chunks = [*self._chunks, chunk]
        self._addresses = None
        self._free_pages = len(chunk)
        if self._own_pages >= expected:
            self._expected_len = 0


class WrappedStore(Store):
    """Delegates to the paged store inside it; subclasses override parts."""

    rows: PagedStore = part(key="")

    def __init__(self, rows: PagedStore) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def over_bus(self) -> bool:
        return self.rows.over_bus

    def expect(self, tokens: int) -> None:
        self.rows.expect(tokens)

    def append(self, block: TokenBlock) -> None:
        self.rows.append(block)

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows.gather(ids)

    def chunks(self, chunk_len: int = 4096, stop: int | None = None) -> RowChunks:
        return self.rows.chunks(chunk_len, stop)

    def before_capture(self) -> None:
        self.rows.before_capture()

    @property
    def capture_obstacle(self) -> str | None:
        return self.rows.capture_obstacle
