"""Searches that the CPU library can do, as it is told of them."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels.codebook.naive import check_valid_codes
from hf_kvret_kernels.paged import WithoutAddresses
from hf_kvret_kernels.paris.codes import ParisCodes, points_of_product

_INT8 = 3


class HostSearch(Protocol):
    """What chooses the ids of a step.

    Attributes:
        kind: the library's number of it.
        heads: which choose, Hkv or a multiple of it that divides Hq; None for Hkv.
    """

    kind: ClassVar[int]

    @property
    def heads(self) -> int | None: ...

    @property
    def packed(self) -> bytes:
        """The library's struct; its addresses are good as long as this object lives."""

    @property
    def token_count(self) -> int | None:
        """How many it knows; None where that does not matter."""


@dataclass(eq=False)
class GivenIds:
    """No search: the ids are there.

    Attributes:
        ids: ``[B, H, Q, k]`` int32, -1 for none; H is Hkv or a multiple of it that divides Hq.
    """

    kind: ClassVar[int] = 0
    token_count: ClassVar[None] = None

    ids: torch.Tensor

    @property
    def heads(self) -> int:
        return self.ids.shape[1]

    @property
    def packed(self) -> bytes:
        return b""


@dataclass(eq=False)
class FlatSearch:
    """The tokens of the highest exact scores.

    Attributes:
        keys: ``[B, Hkv, n, Dk]`` of the query's dtype, tokens contiguous.
    """

    kind: ClassVar[int] = 1
    heads: ClassVar[None] = None
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("@P2q")

    keys: torch.Tensor

    @property
    def token_count(self) -> int:
        return self.keys.shape[2]

    @property
    def packed(self) -> bytes:
        keys = self.keys = _dense_rows(self.keys)
        return self._STRUCT.pack(keys.data_ptr(), keys.stride(0), keys.stride(1))


@dataclass(eq=False)
class ParisSearch(WithoutAddresses):
    """ParisKV's two stages, see ``paris.search``.

    Packed once: not to be changed after its first use.

    Attributes:
        codes: of the n tokens.
        counts: ``[B, Hkv, S, 256]`` int32 of ``paris.count_centroids``.
        signs: ``[B, Hkv, P]`` fp32 of the rotation, see ``paris.scaled_signs``.
        levels: ``[8]`` fp32.
        shares: ``[tiers]`` int64, ``rho`` times each tier in millionths.
        candidates: tokens that are reranked.
        means: ``[B, Hkv, blocks, Dk]`` fp32 that were subtracted from keys, or None.
        block_len: tokens of a block, a power of two from 64 on.
        samples: ``[B, Hkv, *, Dk]`` fp32 keys, see ``paris.search``, or None.
        mean_query: one query for the group, the mean of its own.
    """

    kind: ClassVar[int] = 2
    heads: ClassVar[None] = None
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("@8P9qif")

    codes: ParisCodes
    counts: torch.Tensor
    signs: torch.Tensor
    levels: torch.Tensor
    shares: torch.Tensor
    candidates: int
    means: torch.Tensor | None = None
    block_len: int = 64
    samples: torch.Tensor | None = None
    mean_query: bool = False

    @functools.cached_property
    def token_count(self) -> int:
        return self.codes.sign.shape[2]

    @functools.cached_property
    def packed(self) -> bytes:
        planes = [_dense_rows(x) for x in (self.codes.sign, self.codes.record)]
        self.codes = ParisCodes(*planes)
        self.counts, self.signs = self.counts.contiguous(), self.signs.contiguous()
        if self.means is not None:
            self.means = self.means.contiguous()
        if self.samples is not None:
            self.samples = self.samples.contiguous()
        return self._STRUCT.pack(
            *(plane.data_ptr() for plane in planes),
            self.counts.data_ptr(),
            0 if self.means is None else self.means.data_ptr(),
            0 if self.samples is None else self.samples.data_ptr(),
            self.signs.data_ptr(),
            self.levels.data_ptr(),
            self.shares.data_ptr(),
            *(stride for plane in planes for stride in plane.stride()[:2]),
            self.signs.shape[2],
            len(self.shares),
            self.candidates,
            self.block_len,
            0 if self.samples is None else self.samples.shape[2],
            self.mean_query,
            points_of_product(tuple(self.shares.tolist())),
        )


@dataclass(eq=False)
class ProxySearch:
    """The tokens whose proxies have the highest scores, see ``proxy.relevance``.

    Attributes:
        query: ``[B, Hq, Q, r]`` fp32 proxies of the queries, scaled; r at most Dk.
        rows: ``[B, F, n, r]`` proxies of the keys, bf16, fp16, fp32 or int8.
        offset: ``[B, Hq, Q]`` fp32 added to all scores of a query before a cap, or None.
        heads: which choose, Hkv or a multiple of it that divides Hq; None for Hkv.
    """

    kind: ClassVar[int] = 3
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("@3P4q2i")

    query: torch.Tensor
    rows: torch.Tensor
    offset: torch.Tensor | None = None
    heads: int | None = None

    @property
    def token_count(self) -> int:
        return self.rows.shape[2]

    @property
    def packed(self) -> bytes:
        self.query, rows = self.query.contiguous(), _dense_rows(self.rows)
        self.rows = rows
        if self.offset is not None:
            self.offset = self.offset.contiguous()
        return self._STRUCT.pack(
            self.query.data_ptr(),
            0 if self.offset is None else self.offset.data_ptr(),
            rows.data_ptr(),
            rows.stride(0),
            rows.stride(1),
            rows.shape[1],
            rows.shape[3],
            _INT8 if rows.dtype == torch.int8 else host_library.DTYPES[rows.dtype],
            0,
        )


@dataclass(eq=False)
class CodebookSearch:
    """The tokens whose codewords have the highest scores, see ``codebook.lookup_scores``.

    Attributes:
        table: ``[B, Hq, Q, C]`` fp32 scores of the codewords.
        codes: ``[B, Hkv, n]`` int16, 0 to C - 1 wherever a token is valid.
    """

    kind: ClassVar[int] = 4
    heads: ClassVar[None] = None
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("@2P3q")

    table: torch.Tensor
    codes: torch.Tensor

    @property
    def token_count(self) -> int:
        return self.codes.shape[2]

    def check(self, valid: torch.Tensor) -> None:
        """WrongIdError where a code of ``valid [B, n]`` tokens is of no codeword."""
        check_valid_codes(self.codes, self.table.shape[3], valid)

    @property
    def packed(self) -> bytes:
        self.table = self.table.contiguous()
        if self.codes.stride(2) != 1:
            self.codes = self.codes.contiguous()
        return self._STRUCT.pack(
            self.table.data_ptr(),
            self.codes.data_ptr(),
            *self.codes.stride()[:2],
            self.table.shape[3],
        )


class Generation(NamedTuple):
    """Centroids, and lists of tokens; rows of any tensor lie side by side.

    Attributes:
        queries: ``[B, Hkv, m, G, Dk]`` of the query's dtype.
        inverse: ``[B, Hkv, m, G]`` fp32, 1 over their lengths in the metric.
        slots: ``[B, m]`` int64, -1 for centroids that are none.
        low: ``[B, Hkv, m, width]`` int16, see ``centroid.take_lists``.
        high: the same, uint8, or None.
    """

    queries: torch.Tensor
    inverse: torch.Tensor
    slots: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor | None


@dataclass(eq=False)
class ListSearch:
    """The tokens in the lists of a query's nearest centroids, then the best of them by their keys.

    See ``centroid.similarity``, ``take_lists``, ``unite`` and ``relevance.best_ids``; of equally
    relevant tokens the first are taken.

    Attributes:
        generations: one or two, with lists of one width.
        nprobe: how many lists a query recalls.
        pending: newest tokens that are recalled with them, at most as many as there are.
        following: tokens recalled behind each of a list's first so many.
        largest, metric: as of ``centroid.similarity`` and ``units``.
    """

    kind: ClassVar[int] = 5
    token_count: ClassVar[None] = None
    heads: ClassVar[None] = None
    _GENERATION: ClassVar[struct.Struct] = struct.Struct("@5P10q")
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("@P7q")

    generations: tuple[Generation, ...]
    nprobe: int
    pending: int
    following: int = 0
    largest: bool = False
    metric: torch.Tensor | None = None

    @property
    def packed(self) -> bytes:
        self.generations = tuple(_dense_generation(part) for part in self.generations)
        parts = [self._pack_generation(part) for part in self.generations]
        none = bytes(self._GENERATION.size)
        width = self.generations[0].low.shape[3]
        options = width, self.nprobe, self.pending, self.following, self.largest
        metric, place = self.metric, [0, 0, 0]
        if metric is not None:
            self.metric = metric = metric.contiguous()
            place = [metric.data_ptr(), *metric.stride()[:2]]
        numbers = self._STRUCT.pack(*place, *options)
        return b"".join([*parts, *[none] * (2 - len(parts)), numbers])

    def _pack_generation(self, part: Generation) -> bytes:
        queries, inverse, slots, low, high = part
        return self._GENERATION.pack(
            queries.data_ptr(),
            inverse.data_ptr(),
            slots.data_ptr(),
            low.data_ptr(),
            0 if high is None else high.data_ptr(),
            *queries.stride()[:2],
            *inverse.stride()[:2],
            slots.stride(0),
            *low.stride()[:2],
            *((0, 0) if high is None else high.stride()[:2]),
            low.shape[2],
        )


def _dense_generation(part: Generation) -> Generation:
    """``part`` with the rows of each tensor side by side."""
    queries, inverse, slots, low, high = part
    if queries.stride()[2:] != (queries.shape[3] * queries.shape[4], queries.shape[4], 1):
        queries = queries.contiguous()
    if slots.stride(1) != 1:
        slots = slots.contiguous()
    high = None if high is None else _dense_rows(high)
    return Generation(queries, _dense_rows(inverse), slots, _dense_rows(low), high)


def _dense_rows(rows: torch.Tensor) -> torch.Tensor:
    """``rows [B, H, n, D]``, itself where tokens lie side by side."""
    width = rows.shape[3]
    dense = rows.stride(3) == 1 and (rows.stride(2) == width or rows.shape[2] == 1)
    return rows if dense else rows.contiguous()
