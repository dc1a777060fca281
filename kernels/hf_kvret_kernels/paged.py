"""Rows of keys and values in pages: gathered through a page table, or copied column by column."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import torch

from hf_kvret_kernels._dispatch import (
    check_attention_inputs,
    check_softcap,
    choose_backend,
    interpreted,
    launching_on,
)
from hf_kvret_kernels.ids import check_id_range


def select(
    chunks: Sequence[torch.Tensor], index: torch.Tensor, device: torch.device | None = None
) -> torch.Tensor:
    """``[N, ...]``: entries of the chunks, counted in order across all of them; a new tensor.

    Args:
        chunks: ``[n_i, ...]`` each, at least one, of one dtype and otherwise one shape. Each is
            read where it lies.
        index: ``[N]`` int64, 0 to the sum of the n_i less 1.
        device: of the result; None for that of ``index``.

    The host waits for ``index`` where there are several chunks.
    """
    device = index.device if device is None else device
    if len(chunks) == 1:
        return chunks[0].index_select(0, index.to(chunks[0].device)).to(device)
    shape = (len(index), *chunks[0].shape[1:])
    result = torch.empty(shape, dtype=chunks[0].dtype, device=device)
    first = 0
    for chunk in chunks:
        inside = ((index >= first) & (index < first + len(chunk))).nonzero()[:, 0]
        part = chunk.index_select(0, (index[inside] - first).to(chunk.device))
        result.index_copy_(0, inside.to(device), part.to(device))
        first += len(chunk)
    return result


class HostRows(Protocol):
    """Rows that attention reads where they lie: ``PagedRows``, or the ``CodedRows`` of ``higgs``.

    Names are as of ``PagedRows``; ``width`` and ``value_start`` of coded rows count bytes.

    Attributes:
        coding_address: of ``hfk_coding``, which says what codes mean; 0 for rows in full.
        triton_module: whose ``gather_partials`` attends to such rows.
    """

    triton_module: ClassVar[str]

    key_dim: int
    value_dim: int
    width: int
    value_start: int
    heads: int
    page_len: int
    token_count: int
    table: torch.Tensor

    @property
    def in_files(self) -> bool: ...
    @property
    def page_address(self) -> torch.Tensor | None: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def coding_address(self) -> int: ...
    def addresses(self) -> torch.Tensor: ...
    def check(self, query: torch.Tensor, ids: torch.Tensor, softcap: float | None) -> None: ...
    def gather_with_torch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    def check_range(self, ids: torch.Tensor) -> None: ...


class WithoutAddresses:
    """Its cached properties hold addresses, which are good for its own tensors alone."""

    def __getstate__(self) -> dict[str, object]:
        """What a copy gets: all but these."""
        cls = type(self)
        cached = {x for x in vars(self) if isinstance(getattr(cls, x, None), cached_property)}
        return {name: value for name, value in vars(self).items() if name not in cached}


@dataclass(eq=False)
class PagedRows:
    """Pages of rows; a row is a key followed by its value, a key alone, or these lie apart.

    Attributes:
        chunks: ``[pages_i, Hkv, page_len, width]`` each, contiguous, all of one dtype, in device
            memory or in host memory (pinned where the table is on a CUDA device), also some here
            and some there. Pages are numbered across chunks in order.
        table: ``[B, max_pages]`` int32; token t of batch row b lies in page
            ``table[b, t // page_len]``. Entries that no id leads to may be anything.
        key_dim: Dk.
        page_address: what ``addresses()`` returned for the same chunks, or None.
        apart: of a head's ``page_len * (Dk + Dv)`` numbers in a page the keys come first, all of
            them, and then the values: both are aligned where rows of both would not be. The
            chunks' shape stays. For coded rows; only some operations take them.
        value_in_key: Dv, where the value is the first numbers of its key and not kept beside it,
            as in latent attention; 0 where it follows the key.
        tokens: how many there are; ids from there on name nothing. None: as many as the table has
            room for.
        in_files: whether chunks are mapped files, and rows may have to be read from a disk.
        heads: Hkv.
        page_len: tokens in a page.
        width: numbers of a row, ``Dk + Dv`` or, with ``value_in_key``, Dk.
        value_dim: Dv.
        value_start: where in a row its value begins, unless they lie apart.
        token_count: how many tokens ids may name.
        dtype: of keys and values.
        coding_address: see ``HostRows``.

    Raises:
        ValueError: no chunks, chunks or table of another form, ``key_dim`` and ``value_in_key``
            that don't fit the width, or more tokens than the table has room for.
    """

    chunks: list[torch.Tensor]
    table: torch.Tensor
    key_dim: int
    page_address: torch.Tensor | None = field(default=None, repr=False)
    apart: bool = False
    value_in_key: int = 0
    tokens: int | None = None
    in_files: bool = False
    # Every step reads these, so they are computed once.
    heads: int = field(init=False, repr=False)
    page_len: int = field(init=False, repr=False)
    width: int = field(init=False, repr=False)
    value_dim: int = field(init=False, repr=False)
    value_start: int = field(init=False, repr=False)
    token_count: int = field(init=False, repr=False)
    coding_address: ClassVar[int] = 0
    triton_module: ClassVar[str] = "hf_kvret_kernels.gather_attention.triton"
    dtype: torch.dtype = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.chunks:
            raise ValueError("chunks is empty: build PagedRows once there is a page")
        first = self.chunks[0]
        # By address, a device reads its own memory and the host's alike.
        both = {self.table.device, torch.device("cpu")}
        places = both if first.device in both else {first.device}
        for number, chunk in enumerate(self.chunks):
            if (
                chunk.ndim != 4
                or chunk.shape[1:] != first.shape[1:]
                or chunk.dtype != first.dtype
                or chunk.device not in places
                or not chunk.is_contiguous()
            ):
                raise ValueError(
                    f"chunks[{number}] is {chunk.dtype} {tuple(chunk.shape)} on {chunk.device}: "
                    "all chunks must be contiguous [pages, Hkv, page_len, Dk + Dv], of one dtype, "
                    "and on one device or some beside the table and some in host memory; chunks[0] "
                    f"is {first.dtype} {tuple(first.shape)} on {first.device}, the table on "
                    f"{self.table.device}"
                )
        if self.table.ndim != 2 or self.table.dtype != torch.int32 or not self.table.shape[1]:
            raise ValueError(
                f"table is {self.table.dtype} {tuple(self.table.shape)}: pass int32 "
                "[B, max_pages] with at least one column"
            )
        _, self.heads, self.page_len, self.width = first.shape
        self.dtype = first.dtype
        self.value_dim = self.value_in_key or self.width - self.key_dim
        self.value_start = 0 if self.value_in_key else self.key_dim
        room = self.table.shape[1] * self.page_len
        self.token_count = room if self.tokens is None else self.tokens
        if self.tokens is not None and not 0 <= self.tokens <= room:
            raise ValueError(f"tokens={self.tokens}: the table has room for 0 to {room} of them")
        if self.value_in_key:
            fits = 0 < self.value_in_key <= self.key_dim == self.width
            if self.apart or not fits:
                raise ValueError(
                    f"value_in_key={self.value_in_key} with key_dim={self.key_dim}: rows are "
                    f"{self.width} wide, all of which is the key, the value at most as long, and "
                    "such rows never lie apart"
                )
        elif not 0 < self.key_dim < self.width:
            raise ValueError(
                f"key_dim={self.key_dim}: rows are {self.width} wide, so it must lie in 1 .. "
                f"{self.width - 1}"
            )

    def __getstate__(self) -> dict[str, object]:
        """Without addresses, which are good in this process alone, and for these chunks."""
        return {**vars(self), "page_address": None}

    def addresses(self) -> torch.Tensor:
        """Byte address of every page: ``[total_pages]`` int64 on the table's device; cached.

        Nothing keeps the chunks alive but this object: hold it as long as the addresses.

        Raises:
            ValueError: the table's device cannot read the chunks: host memory that is not pinned,
                chunks on another GPU, or device memory under Triton's interpreter.
        """
        if self.page_address is None:
            self._check_readable()
            starts = []
            for chunk in self.chunks:
                page_bytes = chunk[0].numel() * chunk.element_size()
                offsets = torch.arange(len(chunk), dtype=torch.int64, device=self.table.device)
                starts.append(offsets * page_bytes + chunk.data_ptr())
            self.page_address = torch.cat(starts)
        return self.page_address

    def alignment_bytes(self) -> int:
        """What the address of every key and every value is a multiple of; at most 16."""
        itemsize = self.chunks[0].element_size()
        offsets = [self.width * itemsize, self.value_start * itemsize]
        return math.gcd(16, *offsets, *(chunk.data_ptr() for chunk in self.chunks))

    def side_alignments(self) -> tuple[int, int]:
        """``alignment_bytes`` of keys and of values where they lie apart."""
        itemsize = self.chunks[0].element_size()
        starts = [chunk.data_ptr() for chunk in self.chunks]
        keys, values = (self.page_len * dim * itemsize for dim in (self.key_dim, self.value_dim))
        return (
            math.gcd(16, keys + values, self.key_dim * itemsize, *starts),
            math.gcd(16, keys + values, keys, self.value_dim * itemsize, *starts),
        )

    def gather(self, ids: torch.Tensor, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[B, H, Q, K, Dk]`` and values ``[B, H, Q, K, Dv]``; rows of holes are zero.

        Args:
            ids: ``[B, H, Q, K]`` int32 token numbers on the table's device, -1 for none; H is Hkv
                or a multiple of it, so that head h reads kv head ``h // (H // Hkv)``.
            backend: ``"naive"`` needs all chunks on the table's device; ``"triton"`` also reads
                pinned host memory; ``"auto"`` is Triton for CUDA tensors.

        Returns:
            Tensors of the chunks' dtype on the table's device (with ``"naive"``, views of one
            buffer, unless they lie apart).

        Raises:
            ValueError: ids of another form, or chunks that the backend cannot read; with
                ``"naive"`` also ids that lead to no row, for which Triton gives zeros.
        """
        self.check_ids(ids)
        if choose_backend(backend, self.table) == "triton":
            from hf_kvret_kernels.paged_triton import gather_rows

            with launching_on(ids):
                return gather_rows(self, ids)
        return self.gather_with_torch(ids)

    def check_ids(self, ids: torch.Tensor) -> None:
        """Raise ValueError unless ``ids`` is ``[B, H, Q, K]`` int32 beside the table."""
        if ids.ndim != 4 or ids.dtype != torch.int32:
            raise ValueError(f"ids is {ids.dtype} {tuple(ids.shape)}: pass int32 [B, H, Q, K]")
        if ids.shape[0] != self.table.shape[0] or ids.shape[1] % self.heads or not ids.shape[1]:
            raise ValueError(
                f"ids has shape {tuple(ids.shape)}: its batch must be {self.table.shape[0]} and "
                f"its heads {self.heads} or a multiple of it"
            )
        if ids.device != self.table.device:
            raise ValueError(
                f"ids is on {ids.device}, the page table on {self.table.device}: move one of them"
            )

    def check(
        self,
        query: torch.Tensor,
        ids: torch.Tensor,
        softcap: float | None,
        coded_dim: int | None = None,
    ) -> None:
        """Check the arguments of operations on the rows that ids name.

        Args:
            query, ids, softcap: as of ``gather_attention``.
            coded_dim: Dk of the keys that coded rows stand for; None where rows are of the query's
                dtype.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit, gradients, a cap that is no cap.
        """
        check_attention_inputs(query=query)
        self.check_ids(ids)
        if self.apart is (coded_dim is None):
            raise ValueError(
                f"rows have apart={self.apart}: keys and values must lie "
                f"{'side by side' if coded_dim is None else 'apart, as codes and scales do'}"
            )
        batch, heads, queries, width = query.shape
        dtype = self.dtype if coded_dim is None else query.dtype
        key_dim = self.key_dim if coded_dim is None else coded_dim
        if query.dtype != dtype or query.device != self.table.device or width != key_dim:
            raise ValueError(
                f"query is {query.dtype} on {query.device} with Dk={width}, the rows are "
                f"{self.dtype} with a page table on {self.table.device} and Dk={key_dim}: they "
                "must agree"
            )
        choosing = ids.shape[1] in (self.heads, heads)
        if ids.shape[0] != batch or ids.shape[2] != queries or not choosing:
            raise ValueError(
                f"ids has shape {tuple(ids.shape)}: pass [{batch}, {self.heads} or {heads}, "
                f"{queries}, K] for a query of shape {tuple(query.shape)}"
            )
        if heads % self.heads:
            raise ValueError(f"query has {heads} heads, no multiple of the rows' {self.heads}")
        check_softcap(softcap)

    def check_range(self, ids: torch.Tensor) -> None:
        """ValueError where one of ``ids [B, H, Q, K]`` leads to no row; looks at the data."""
        if ids.is_meta:
            # They have a form alone.
            return
        check_id_range(ids, self.token_count)
        columns = (ids.flatten(1).long() // self.page_len).clamp(min=0)
        entries = self.table.gather(1, columns)[ids.flatten(1) >= 0]
        count = sum(len(chunk) for chunk in self.chunks)
        if entries.numel() and (int(entries.min()) < 0 or int(entries.max()) >= count):
            raise ValueError(
                f"an id leads to a table entry that names none of the {count} pages: entries that "
                "ids lead to must hold page numbers"
            )

    def gather_with_torch(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``gather`` with ``"naive"``, for ids of the right form; looks at them."""
        for chunk in self.chunks:
            if chunk.device != ids.device:
                raise ValueError(
                    f"the rows lie on {chunk.device}, ids on {ids.device}: use backend='triton' "
                    "with pinned rows, or move the ids"
                )
        self.check_range(ids)
        hole = ids < 0
        batch, heads = ids.shape[:2]
        rows = torch.arange(batch, device=ids.device).view(-1, 1, 1, 1).expand_as(ids)
        kv_heads = torch.arange(heads, device=ids.device) // (heads // self.heads)
        kv_heads = kv_heads.view(1, -1, 1, 1).expand_as(ids)
        slots = ids.clamp_min(0).long()
        places = rows.flatten(), kv_heads.flatten(), slots.flatten(), hole.flatten()
        holes = places[3].nonzero()[:, 0]
        taken = self._take_sides(*places) if self.apart else [self.take(*places)]
        if len(holes):
            for part in taken:
                part.index_fill_(0, holes, 0.0)
        keys, values = taken if self.apart else self.sides(taken[0])
        return keys.view(*ids.shape, self.key_dim), values.view(*ids.shape, self.value_dim)

    def sides(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[..., Dk]`` and ``[..., Dv]`` of ``rows [..., width]`` that don't lie apart."""
        start = self.value_start
        return rows[..., : self.key_dim], rows[..., start : start + self.value_dim]

    def take(
        self,
        batch_rows: torch.Tensor,
        kv_heads: torch.Tensor,
        tokens: torch.Tensor,
        holes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[N, width]``: one row each for ``[N]`` int64 batch rows, KV heads and tokens.

        ``holes [N]`` bool marks places that may get any row. The chunks must lie on the device of
        the table.

        Raises:
            ValueError: rows that lie apart, which have no keys beside their values.
        """
        if self.apart:
            raise ValueError("these rows lie apart: read them with gather or gather_with_torch")
        pages = self._pages_of(batch_rows, tokens, holes)
        index = (pages * self.heads + kv_heads) * self.page_len + tokens % self.page_len
        return select([chunk.view(-1, self.width) for chunk in self.chunks], index)

    def _pages_of(
        self, batch_rows: torch.Tensor, tokens: torch.Tensor, holes: torch.Tensor | None
    ) -> torch.Tensor:
        """``[N]`` int64 pages that hold tokens; some page for ``holes``."""
        pages = self.table[batch_rows, tokens // self.page_len].long()
        return pages if holes is None else pages.masked_fill_(holes, 0)

    def _take_sides(
        self,
        batch_rows: torch.Tensor,
        kv_heads: torch.Tensor,
        tokens: torch.Tensor,
        holes: torch.Tensor,
    ) -> list[torch.Tensor]:
        """``take`` where they lie apart: keys ``[N, Dk]`` and values ``[N, Dv]``."""
        blocks = self._pages_of(batch_rows, tokens, holes) * self.heads + kv_heads
        slots, first = tokens % self.page_len, self.page_len * self.key_dim
        return [
            self._take_side(blocks, slots, 0, self.key_dim),
            self._take_side(blocks, slots, first, self.value_dim),
        ]

    def _take_side(
        self, blocks: torch.Tensor, slots: torch.Tensor, first: int, dim: int
    ) -> torch.Tensor:
        """``[N, dim]``: keys or values of slots in blocks, which are heads of pages."""
        size = self.page_len * self.width
        # The largest units that rows are made of, and begin at multiples of.
        unit = math.gcd(size, first, dim)
        starts = blocks * (size // unit) + (first + slots * dim) // unit
        index = (starts[:, None] + torch.arange(dim // unit, device=starts.device)).flatten()
        return select([chunk.view(-1, unit) for chunk in self.chunks], index).view(-1, dim)

    def _check_readable(self) -> None:
        device = self.table.device
        if device.type == "cuda" and interpreted():
            raise ValueError(
                "TRITON_INTERPRET=1 cannot follow addresses of device memory: unset it, or use "
                "backend='naive'"
            )
        for chunk in self.chunks:
            if chunk.device == device:
                continue
            if device.type != "cuda" or chunk.device.type != "cpu":
                raise ValueError(
                    f"the page table is on {device}, the rows on {chunk.device}: keep the rows "
                    "there, or in pinned host memory for a CUDA device"
                )
            if not chunk.is_pinned():
                raise ValueError(
                    f"rows in host memory are not pinned, {device} cannot read them: allocate them "
                    "with pin_memory=True or register them with cudaHostRegister"
                )


def lay_apart(rows: torch.Tensor, key_dim: int) -> torch.Tensor:
    """Pages ``[..., page_len, Dk + Dv]`` of rows, made ``apart``; a new, contiguous tensor."""
    sides = [rows[..., :key_dim].flatten(-2), rows[..., key_dim:].flatten(-2)]
    return torch.cat(sides, dim=-1).view(rows.shape)


def join_sides(pages: torch.Tensor, key_dim: int) -> torch.Tensor:
    """Rows of pages ``[..., page_len, Dk + Dv]`` that are ``apart``; a new, contiguous tensor."""
    page_len, width = pages.shape[-2:]
    sides = pages.flatten(-2).split([page_len * key_dim, page_len * (width - key_dim)], dim=-1)
    return torch.cat([side.unflatten(-1, (page_len, -1)) for side in sides], dim=-1)


# Runs of consecutive pages that are copied one after the other: so many, or one for so many pages.
_MOST_RUNS = 4
_LEAST_RUN = 16


def copy_pages(
    rows: PagedRows,
    first: int,
    last: int,
    *,
    width: int | None = None,
    programs: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``[B, Hkv, (last - first) * page_len, width]``: the tokens of some columns of the table.

    A new tensor of the rows' dtype on the table's device. The last page is copied whole: behind the
    newest token stands whatever its memory held.

    Args:
        rows: on the table's device; with ``"triton"`` also in pinned host memory, or in both.
        first, last: columns ``first .. last`` of the table, at least one.
        width: numbers of each row, from its first on; None for all. The result is
            contiguous, but with ``"triton"``, which copies whole rows, and of rows that lie apart
            a view of all numbers.
        programs: of ``"triton"``, how many programs share the work; None for as many as there is
            work for. Few of them leave the rest of the device to others, for rows that come over a
            bus anyway.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``. The host is never waited for with
            ``"triton"``, nor with ``"naive"`` where all rows lie in one chunk.

    Raises:
        ValueError: columns that the table does not have, a width that rows don't have,
            ``programs`` below 1, rows that the backend can't read, an unknown backend.
        ImportError: ``"triton"`` without Triton.
    """
    if not 0 <= first < last <= rows.table.shape[1]:
        raise ValueError(
            f"columns {first} .. {last}: the table has {rows.table.shape[1]} of them, and at least "
            "one must be asked for"
        )
    if programs is not None and programs < 1:
        raise ValueError(f"programs={programs}: at least 1, or None for as many as there is work")
    width = rows.width if width is None else width
    if not 0 < width <= rows.width:
        raise ValueError(f"width={width}: rows have {rows.width} numbers, ask for 1 to all of them")
    copied_len = rows.width if rows.apart else width
    if choose_backend(backend, rows.table) == "naive":
        result = _copy_with_torch(rows, first, last, copied_len)
    else:
        from hf_kvret_kernels.paged_triton import copy_pages as copy_with_triton

        with launching_on(rows.table):
            result = copy_with_triton(rows, first, last, programs)
    if rows.apart:
        pages = result.unflatten(2, (last - first, rows.page_len))
        result = join_sides(pages, rows.key_dim).flatten(2, 3)
    return result[..., :width]


def _copy_with_torch(rows: PagedRows, first: int, last: int, width: int) -> torch.Tensor:
    for chunk in rows.chunks:
        if chunk.device != rows.table.device:
            raise ValueError(
                f"rows lie on {chunk.device}, the page table on {rows.table.device}: use "
                "backend='triton' with pinned rows, or move the table"
            )
    if rows.table.is_cpu:
        table = rows.table[:, first:last].tolist()
        runs = list(_runs(table, rows.chunks))
        if len(runs) <= _MOST_RUNS + (last - first) * len(table) // _LEAST_RUN:
            return _copy_runs(rows, runs, last - first, width)
    index = rows.table[:, first:last].long()
    pages = select(rows.chunks, index.reshape(-1))
    pages = pages.view(*index.shape, *pages.shape[1:])[..., :width]
    return pages.transpose(1, 2).flatten(2, 3).contiguous()


# Consecutive pages of a chunk, behind the row and first column of the table that name them.
_Run = tuple[int, int, torch.Tensor]


def _runs(table: list[list[int]], chunks: Sequence[torch.Tensor]) -> Iterator[_Run]:
    starts = list(itertools.accumulate((len(chunk) for chunk in chunks), initial=0))
    for row, pages in enumerate(table):
        first = 0
        for column, page in enumerate(pages, start=1):
            if column < len(pages) and pages[column] == page + 1 and page + 1 not in starts:
                continue
            number = bisect.bisect_right(starts, page) - 1
            inside = pages[first] - starts[number]
            yield row, first, chunks[number][inside : inside + column - first]
            first = column


def _copy_runs(rows: PagedRows, runs: list[_Run], columns: int, width: int) -> torch.Tensor:
    shape = len(rows.table), rows.heads, columns, rows.page_len, width
    result = torch.empty(shape, dtype=rows.dtype, device=rows.table.device)
    for row, column, pages in runs:
        place = result[row, :, column : column + len(pages)]
        place.copy_(pages[..., :width].transpose(0, 1))
    return result.flatten(2, 3)
