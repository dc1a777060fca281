"""Searches that the CPU library can do, as it is told of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from hf_kvret_kernels import host_library
from hf_kvret_kernels.paris.codes import ParisCodes

_INT8 = 3


class HostSearch(Protocol):
    """What chooses the ids of a step.

    Attributes:
        kind: the library's number of it.
    """

    kind: ClassVar[int]

    def pack(self) -> bytes:
        """The library's struct; its addresses are good as long as this object lives."""

    def tokens(self) -> int | None:
        """How many it knows; None where that does not matter."""


@dataclass(eq=False)
class GivenIds:
    """No search: the ids are there.

    Attributes:
        ids: ``[B, H, Q, k]`` int32, -1 for none; H is Hkv or a multiple of it that divides Hq.
    """

    kind: ClassVar[int] = 0

    ids: torch.Tensor

    def tokens(self) -> int | None:
        return None

    def pack(self) -> bytes:
        return b""


@dataclass(eq=False)
class FlatSearch:
    """The tokens of the highest exact scores.

    Attributes:
        keys: ``[B, Hkv, n, Dk]`` of the query's dtype, tokens contiguous.
    """

    kind: ClassVar[int] = 1
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("@P2q")

    keys: torch.Tensor

    def tokens(self) -> int | None:
        return self.keys.shape[2]

    def pack(self) -> bytes:
        keys = self.keys = _dense_rows(self.keys)
        return self._STRUCT.pack(keys.data_ptr(), keys.stride(0), keys.stride(1))


@dataclass(eq=False)
class ParisSearch:
    """ParisKV's two stages, see ``paris.collisions`` and the functions after it.

    Attributes:
        codes: of the n tokens.
        counts: ``[B, Hkv, S, 2**m]`` int32 of ``paris.count_centroids``.
        signs: ``[P]`` fp32 of the rotation.
        levels: ``[8]`` fp32.
        shares: ``[tiers]`` int64, ``rho`` times each tier in millionths.
        m: coordinates of a subspace.
        candidates: tokens that are reranked.
        mean: ``[B, Hkv, Dk]`` fp32 to be added back, for a soft cap; else None.
        mean_query: one query for the group, the mean of its own.
    """

    kind: ClassVar[int] = 2
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("@8P10q2i")

    codes: ParisCodes
    counts: torch.Tensor
    signs: torch.Tensor
    levels: torch.Tensor
    shares: torch.Tensor
    m: int
    candidates: int
    mean: torch.Tensor | None = None
    mean_query: bool = False

    def tokens(self) -> int | None:
        return self.codes.sign.shape[2]

    def pack(self) -> bytes:
        codes = self.codes
        planes = [_dense_rows(x) for x in (codes.sign, codes.magnitude, codes.weight)]
        self.codes = ParisCodes(*planes)
        self.counts = self.counts.contiguous()
        if self.mean is not None:
            self.mean = self.mean.contiguous()
        return self._STRUCT.pack(
            *(plane.data_ptr() for plane in planes),
            self.counts.data_ptr(),
            0 if self.mean is None else self.mean.data_ptr(),
            self.signs.data_ptr(),
            self.levels.data_ptr(),
            self.shares.data_ptr(),
            *(stride for plane in planes for stride in plane.stride()[:2]),
            len(self.signs),
            self.m,
            len(self.shares),
            self.candidates,
            host_library.DTYPES[codes.weight.dtype],
            self.mean_query,
        )


@dataclass(eq=False)
class ProxySearch:
    """The tokens whose proxies have the highest scores, see ``proxy.relevance``.

    Attributes:
        query: ``[B, Hq, Q, r]`` fp32 proxies of the queries, scaled; r at most Dk.
        rows: ``[B, F, n, r]`` proxies of the keys, bf16, fp16, fp32 or int8.
        offset: ``[B, Hq, Q]`` fp32 added to all scores of a query before a cap, or None.
    """

    kind: ClassVar[int] = 3
    _STRUCT: ClassVar[struct.Struct] = struct.Struct("@3P4q2i")

    query: torch.Tensor
    rows: torch.Tensor
    offset: torch.Tensor | None = None

    def tokens(self) -> int | None:
        return self.rows.shape[2]

    def pack(self) -> bytes:
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


def _dense_rows(rows: torch.Tensor) -> torch.Tensor:
    """``rows [B, H, n, D]``, itself where tokens lie side by side."""
    width = rows.shape[3]
    dense = rows.stride(3) == 1 and (rows.stride(2) == width or rows.shape[2] == 1)
    return rows if dense else rows.contiguous()
