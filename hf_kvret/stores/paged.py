"""PagedStore: rows in pages, found through a page table.

A row is a key followed by its value. Pages hold ``page_len`` consecutive tokens of every KV
head; the table says which pages hold the tokens of which batch row. Reordering beams and
forking a cache touch the table alone, and growing never moves a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch

from hf_kvret.block import TokenBlock
from hf_kvret.stores.base import Store, StoreBytes
from hf_kvret.stores.memory import HostMemory, PageMemory
from hf_kvret_kernels.gather_attention import gather_attention
from hf_kvret_kernels.gather_scores import gather_scores
from hf_kvret_kernels.paged import PagedRows


class PagedStore(Store):
    """Full-precision rows in the pages of one ``PageMemory``.

    Pages are written once and never freed before the store is: a row or fork that may share the
    last, partial page takes a copy of it before writing on.
    """

    def __init__(self, memory: PageMemory, page_len: int = 64) -> None:
        self.memory = memory
        self.page_len = page_len
        self.length = 0
        self._chunks: list[torch.Tensor] = []
        self._free_pages = 0
        self._own_pages = 0
        self._table: torch.Tensor | None = None
        self._tail: torch.Tensor | None = None
        self._key_dim = 0
        self._rows: PagedRows | None = None
        self._addresses: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.length

    @property
    def over_bus(self) -> bool:
        return isinstance(self.memory, HostMemory)

    def append(self, block: TokenBlock) -> None:
        if block.start != self.length:
            raise ValueError(f"block starts at slot {block.start}, the store ends at {self.length}")
        if len(block) == 0:
            return
        rows = torch.cat([block.keys, block.values], dim=-1)
        self._key_dim = block.keys.shape[-1]
        offset = self.length % self.page_len
        if offset and self._tail is not None:
            taken = min(self.page_len - offset, rows.shape[2])
            self.memory.write(self._tail[:, :, offset : offset + taken], rows[:, :, :taken])
            rows = rows[:, :, taken:]
        elif offset:
            column = self.length // self.page_len
            held = self._dense(column, column + 1)[:, :, :offset]
            rows = torch.cat([held.to(rows.device), rows], dim=2)
        if rows.shape[2]:
            self._add_pages(rows, column=-(-(block.end - rows.shape[2]) // self.page_len))
        self.length = block.end

    def attend(
        self,
        query: torch.Tensor,
        ids: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gather_attention(query, self.paged_rows(), ids, scale=scale, softcap=softcap)

    def scores(
        self,
        query: torch.Tensor,
        ids: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        return gather_scores(query, self.paged_rows(), ids, scale=scale, softcap=softcap)

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.paged_rows().gather(ids)

    def chunks(self, piece_len: int = 4096) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        step = max(1, piece_len // self.page_len)
        for first in range(0, self._page_count, step):
            start = first * self.page_len
            rows = self._dense(first, min(first + step, self._page_count))
            rows = rows[:, :, : self.length - start].to(self.memory.device)
            yield start, rows[..., : self._key_dim], rows[..., self._key_dim :]

    def reorder(self, rows: torch.Tensor) -> None:
        if self._table is not None:
            self._table = self._table.index_select(0, rows.to(self._table.device))
            self._tail = None
            self._forget_rows()

    def crop(self, cold_len: int) -> None:
        if cold_len < self.length:
            self.length, self._tail = cold_len, None

    def fork(self) -> Self:
        twin = type(self)(self.memory, self.page_len)
        twin.length, twin._key_dim = self.length, self._key_dim
        twin._chunks, twin._table, twin._rows = list(self._chunks), self._table, self._rows
        return twin

    def nbytes(self) -> StoreBytes:
        rows = sum(chunk.numel() * chunk.element_size() for chunk in self._chunks)
        table = 0 if self._table is None else self._table.numel() * self._table.element_size()
        if self.over_bus:
            return StoreBytes(device=table, host=rows)
        return StoreBytes(device=rows + table)

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self.length == 0:
            return {}
        rows = self._dense(0, self._page_count)[:, :, : self.length].cpu()
        keys, values = rows[..., : self._key_dim], rows[..., self._key_dim :]
        return {"keys": keys.contiguous(), "values": values.contiguous()}

    @property
    def _page_count(self) -> int:
        return -(-self.length // self.page_len)

    def paged_rows(self) -> PagedRows:
        """The rows as kernels read them, once what was written before has arrived.

        Valid until the next change of the store. RuntimeError for an empty one.
        """
        self.memory.wait()
        if self._table is None:
            raise RuntimeError("the store is empty: append first")
        if self._rows is None:
            self._rows = PagedRows(self._chunks, self._table, self._key_dim, self._addresses)
        return self._rows

    def _dense(self, first: int, last: int) -> torch.Tensor:
        """Table columns ``first .. last`` as rows ``[B, Hkv, n, W]``, where the chunks lie."""
        if self._table is None:
            raise RuntimeError("the store is empty: append first")
        self.memory.wait()
        if self.memory.device.type == "cuda" and isinstance(self.memory, HostMemory):
            torch.cuda.current_stream(self.memory.device).synchronize()
        table = self._table[:, first:last].to(self._chunks[0].device)
        pages = self._take(table.reshape(-1).long())
        pages = pages.view(*table.shape, *pages.shape[1:]).transpose(1, 2)
        return pages.flatten(2, 3)

    def _take(self, pages: torch.Tensor) -> torch.Tensor:
        """``[N, Hkv, page_len, W]``: the pages with the global numbers ``pages [N]``."""
        if len(self._chunks) == 1:
            return self._chunks[0].index_select(0, pages)
        taken = self._chunks[0].new_empty(len(pages), *self._chunks[0].shape[1:])
        first = 0
        for chunk in self._chunks:
            inside = ((pages >= first) & (pages < first + len(chunk))).nonzero()[:, 0]
            taken[inside] = chunk.index_select(0, pages[inside] - first)
            first += len(chunk)
        return taken

    def _add_pages(self, rows: torch.Tensor, column: int) -> None:
        """Write ``rows [B, Hkv, n, W]`` to new pages, from table column ``column`` on."""
        batch, heads, count, width = rows.shape
        columns = -(-count // self.page_len)
        missing = columns * self.page_len - count
        padded = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        paged = padded.view(batch, heads, columns, self.page_len, width).transpose(1, 2)
        self._forget_rows()
        first, target = self._allocate(batch * columns, (heads, self.page_len, width), rows.dtype)
        self.memory.write(target, paged.reshape(target.shape))
        self._tail = target.view(batch, columns, *target.shape[1:])[:, -1]
        numbers = torch.arange(first, first + batch * columns, dtype=torch.int32)
        numbers = numbers.view(batch, columns).to(self.memory.device)
        if self._table is None:
            self._table = numbers
        else:
            self._table = torch.cat([self._table[:, :column], numbers], dim=1)

    def _forget_rows(self) -> None:
        """The table is about to change; the pages stay where they are."""
        if self._rows is not None and self._rows.page_address is not None:
            self._addresses = self._rows.page_address
        self._rows = None

    def _allocate(
        self, pages: int, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> tuple[int, torch.Tensor]:
        """Number of the first of ``pages`` consecutive new pages, and the view of them.

        The first chunk has exactly the size of the prompt; later ones at least an eighth of
        all that this store made, so that there are few. A fork starts from nothing.
        """
        if pages > self._free_pages:
            size = max(pages, self._own_pages // 8)
            self._own_pages += size
            self._chunks = [*self._chunks, self.memory.allocate((size, *shape), dtype)]
            self._addresses = None
            self._free_pages = size
        chunk = self._chunks[-1]
        start = len(chunk) - self._free_pages
        self._free_pages -= pages
        first = sum(len(other) for other in self._chunks[:-1]) + start
        return first, chunk[start : start + pages]
