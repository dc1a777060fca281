"""Triton kernels that score all tokens: centroid counts, bonus tables, collisions."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels.paris.codes import EXCLUDED
from hf_kvret_kernels.paris.naive import SHARE_UNIT

_EXCLUDED = tl.constexpr(EXCLUDED)
_SHARE_UNIT = tl.constexpr(SHARE_UNIT)
# Sign bytes that a program of eight warps looks up, and tokens that one counts.
_TILE = 4096
_TOKENS = 1024
# Centroids that all 2**m are compared with at a time, by eight warps.
_CHUNK = 64


def count_centroids(sign: torch.Tensor, m: int, valid: torch.Tensor | None) -> torch.Tensor:
    batch, heads, length, width = sign.shape
    shape = (batch, heads, width * 8 // m, 1 << m)
    counts = torch.zeros(shape, dtype=torch.int32, device=sign.device)
    _count_kernel[(triton.cdiv(length, _TOKENS), batch * heads, width)](
        sign,
        _mask_bytes(sign, valid),
        counts,
        length,
        heads,
        *sign.stride()[:2],
        *_mask_strides(valid),
        HAS_VALID=valid is not None,
        M=m,
        BYTES=width,
        BLOCK=_TOKENS,
    )
    return counts


def bonus_table(
    q_rot: torch.Tensor, counts: torch.Tensor, shares: tuple[int, ...], m: int
) -> torch.Tensor:
    batch, heads, queries, tables, dim = q_rot.shape
    shape = (batch, heads, queries, tables, dim // m, 1 << m)
    bonus = torch.empty(shape, dtype=torch.uint8, device=q_rot.device)
    _bonus_kernel[(dim // m, batch * heads * queries * tables)](
        q_rot.contiguous(),
        counts.contiguous(),
        bonus,
        queries * tables,
        SHARES=shares,
        M=m,
        SUBSPACES=dim // m,
        CHUNK=min(_CHUNK, 1 << m),
        num_warps=8,
    )
    return bonus


def collide(
    sign: torch.Tensor, bonus: torch.Tensor, m: int, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, tables = bonus.shape[:4]
    length, width = sign.shape[2:]
    device = sign.device
    scores = torch.empty(batch, heads, queries, length, dtype=torch.uint8, device=device)
    histogram = torch.zeros(batch, heads, queries, 256, dtype=torch.int32, device=device)
    block = min(_TOKENS, _TILE // width)
    _collide_kernel[(triton.cdiv(length, block), batch * heads * queries)](
        sign,
        bonus.contiguous(),
        _mask_bytes(sign, valid),
        scores,
        histogram,
        length,
        heads,
        queries,
        *sign.stride()[:2],
        *_mask_strides(valid),
        HAS_VALID=valid is not None,
        TABLES=tables,
        M=m,
        BYTES=width,
        BLOCK=block,
        num_warps=8,
    )
    return scores, histogram


def _mask_bytes(sign: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """A pointer that the kernel may ignore where nothing is masked."""
    return sign if valid is None else valid.view(torch.uint8)


def _mask_strides(valid: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if valid is None else (valid.stride(0), valid.stride(1))


@triton.jit
def _count_kernel(
    sign_ptr,
    valid_ptr,
    counts_ptr,
    length,
    heads,
    sign_stride_b,
    sign_stride_h,
    valid_stride_b,
    valid_stride_n,
    HAS_VALID: tl.constexpr,
    M: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One byte column of a block of tokens: one or two subspaces."""
    CENTROIDS: tl.constexpr = 1 << M
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    column = tl.program_id(2)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = tokens < length
    if HAS_VALID:
        mask_ptr = valid_ptr + b * valid_stride_b + tokens * valid_stride_n
        counted = counted & (tl.load(mask_ptr, mask=counted, other=0) != 0)
    place = sign_ptr + b * sign_stride_b + h * sign_stride_h + tokens * BYTES + column
    byte = tl.load(place, mask=counted, other=0).to(tl.int32)
    # As many bins again: what is not counted goes to the first of those.
    bins = tl.arange(0, 2 * CENTROIDS)
    counts_ptr += tl.program_id(1).to(tl.int64) * (BYTES * 8 // M) * CENTROIDS
    for part in tl.static_range(8 // M):
        ids = (byte >> (part * M)) & (CENTROIDS - 1)
        found = tl.histogram(tl.where(counted, ids, CENTROIDS), 2 * CENTROIDS)
        row_ptr = counts_ptr + (column * (8 // M) + part) * CENTROIDS
        tl.atomic_add(row_ptr + bins, found, mask=(bins < CENTROIDS) & (found > 0))


@triton.jit
def _pattern_sims(q_ptr, ids, M: tl.constexpr):
    """``<q_b, sign pattern>`` of centroids ``ids``, added in the order of the coordinates."""
    sims = tl.zeros(ids.shape, dtype=tl.float32)
    for j in tl.static_range(M):
        value = tl.load(q_ptr + j)
        sims += tl.where(((ids >> j) & 1) == 1, value, -value)
    return sims


@triton.jit
def _bonus_kernel(
    q_ptr,
    counts_ptr,
    bonus_ptr,
    queries_per_head,
    SHARES: tl.constexpr,
    M: tl.constexpr,
    SUBSPACES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One subspace of one query. All pairs of centroids are compared: 65,536, no sort."""
    CENTROIDS: tl.constexpr = 1 << M
    s = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    q_ptr += row * SUBSPACES * M + s * M
    counts_ptr += ((row // queries_per_head) * SUBSPACES + s) * CENTROIDS
    ids = tl.arange(0, CENTROIDS)
    sims = _pattern_sims(q_ptr, ids, M)
    total = tl.sum(tl.load(counts_ptr + ids)).to(tl.int64)
    before = tl.zeros((CENTROIDS,), dtype=tl.int32)
    for start in range(0, CENTROIDS, CHUNK):
        others = start + tl.arange(0, CHUNK)
        held = tl.load(counts_ptr + others)
        other_sims = _pattern_sims(q_ptr, others, M)
        ahead = other_sims[None, :] > sims[:, None]
        ahead = ahead | ((other_sims[None, :] == sims[:, None]) & (others[None, :] < ids[:, None]))
        before += tl.sum(tl.where(ahead, held[None, :], 0), axis=1)
    points = tl.zeros((CENTROIDS,), dtype=tl.int32)
    for t in tl.static_range(len(SHARES)):
        reach = (total * SHARES[t] + _SHARE_UNIT - 1) // _SHARE_UNIT
        points += (before < reach).to(tl.int32)
    tl.store(bonus_ptr + (row * SUBSPACES + s) * CENTROIDS + ids, points.to(tl.uint8))


@triton.jit
def _collide_kernel(
    sign_ptr,
    bonus_ptr,
    valid_ptr,
    scores_ptr,
    histogram_ptr,
    length,
    heads,
    queries,
    sign_stride_b,
    sign_stride_h,
    valid_stride_b,
    valid_stride_n,
    HAS_VALID: tl.constexpr,
    TABLES: tl.constexpr,
    M: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    CENTROIDS: tl.constexpr = 1 << M
    PER_BYTE: tl.constexpr = 8 // M
    row = tl.program_id(1).to(tl.int64)
    b = row // queries // heads
    h = row // queries % heads
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = tokens < length
    if HAS_VALID:
        mask_ptr = valid_ptr + b * valid_stride_b + tokens * valid_stride_n
        counted = counted & (tl.load(mask_ptr, mask=counted, other=0) != 0)
    column = tl.arange(0, BYTES)[None, :]
    places = b * sign_stride_b + h * sign_stride_h + tokens[:, None] * BYTES + column
    byte = tl.load(sign_ptr + places, mask=counted[:, None], other=0).to(tl.int32)

    best = tl.zeros((BLOCK,), dtype=tl.int32)
    bonus_ptr += row * TABLES * (BYTES * PER_BYTE * CENTROIDS)
    for g in range(TABLES):
        points = tl.zeros((BLOCK,), dtype=tl.int32)
        for part in tl.static_range(PER_BYTE):
            ids = (byte >> (part * M)) & (CENTROIDS - 1)
            entries = (g * BYTES * PER_BYTE + column * PER_BYTE + part) * CENTROIDS + ids
            points += tl.sum(tl.load(bonus_ptr + entries).to(tl.int32), axis=1)
        best = tl.maximum(best, points)
    best = tl.where(counted, best, _EXCLUDED)
    tl.store(scores_ptr + row * length + tokens, best.to(tl.uint8), mask=tokens < length)

    bins = tl.arange(0, 256)
    found = tl.histogram(best, 256)
    wanted = (bins < _EXCLUDED) & (found > 0)
    tl.atomic_add(histogram_ptr + row * 256 + bins, found, mask=wanted)
