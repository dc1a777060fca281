"""Triton kernel of the bonus tables: what a key earns by its centroid, four tables in a word."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels.paris.naive import SHARE_UNIT

_SHARE_UNIT = tl.constexpr(SHARE_UNIT)
# Centroids that all 2**m are compared with at a time, by eight warps.
_CHUNK = 32
# Tables whose points one load brings. Sums of points stay below 255: none reaches into the next.
PER_WORD = 4


def bonus_words(
    q_rot: torch.Tensor,
    counts: torch.Tensor,
    shares: tuple[int, ...],
    m: int,
    histogram: torch.Tensor,
) -> torch.Tensor:
    """``[B, H, Q, W, S, 2**m, 4]`` uint8: four tables side by side, those beyond G of zeros.

    Also zeroes ``histogram [B, H, Q, 256]`` int32, for the kernel that adds to it.
    """
    batch, heads, queries, tables, dim = q_rot.shape
    words = triton.cdiv(tables, PER_WORD)
    shape = (batch, heads, queries, words, dim // m, 1 << m, PER_WORD)
    bonus = torch.empty(shape, dtype=torch.uint8, device=q_rot.device)
    # The long axis first: a grid has 2**31 - 1 programs there, and 65,535 on the others.
    _bonus_kernel[(batch * heads * queries * words * PER_WORD, dim // m)](
        q_rot.contiguous(),
        counts.contiguous(),
        bonus,
        histogram,
        queries,
        TABLES=tables,
        WORDS=words,
        PER_WORD=PER_WORD,
        SHARES=shares,
        M=m,
        SUBSPACES=dim // m,
        CHUNK=min(_CHUNK, 1 << m),
        num_warps=8,
        enable_fp_fusion=True,
    )
    return bonus


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
    histogram_ptr,
    queries,
    TABLES: tl.constexpr,
    WORDS: tl.constexpr,
    PER_WORD: tl.constexpr,
    SHARES: tl.constexpr,
    M: tl.constexpr,
    SUBSPACES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One subspace of one table. All pairs of centroids are compared: 65,536, no sort."""
    CENTROIDS: tl.constexpr = 1 << M
    s = tl.program_id(1)
    table = tl.program_id(0) % (WORDS * PER_WORD)
    row = (tl.program_id(0) // (WORDS * PER_WORD)).to(tl.int64)
    bins = tl.arange(0, 256)
    # 0 in one program of a query alone: in that of the first subspace of the first table.
    other = table * SUBSPACES + s
    zeros = tl.zeros((256,), tl.int32)
    tl.store(histogram_ptr + row * 256 + bins, zeros, mask=bins + other * 256 < 256)
    ids = tl.arange(0, CENTROIDS)
    points = tl.zeros((CENTROIDS,), dtype=tl.int32)
    if table < TABLES:
        q_ptr += ((row * TABLES + table) * SUBSPACES + s) * M
        counts_ptr += ((row // queries) * SUBSPACES + s) * CENTROIDS
        sims = _pattern_sims(q_ptr, ids, M)
        total = tl.sum(tl.load(counts_ptr + ids)).to(tl.int64)
        before = tl.zeros((CENTROIDS,), dtype=tl.int32)
        for start in range(0, CENTROIDS, CHUNK):
            others = start + tl.arange(0, CHUNK)
            key_counts = tl.load(counts_ptr + others)
            there = _pattern_sims(q_ptr, others, M)[None, :]
            ahead = there > sims[:, None]
            ahead = ahead | ((there == sims[:, None]) & (others[None, :] < ids[:, None]))
            before += tl.sum(tl.where(ahead, key_counts[None, :], 0), axis=1)
        for t in tl.static_range(len(SHARES)):
            reach = (total * SHARES[t] + _SHARE_UNIT - 1) // _SHARE_UNIT
            points += (before < reach).to(tl.int32)
    place = ((row * WORDS + table // PER_WORD) * SUBSPACES + s) * CENTROIDS + ids
    tl.store(bonus_ptr + place * PER_WORD + table % PER_WORD, points.to(tl.uint8))
