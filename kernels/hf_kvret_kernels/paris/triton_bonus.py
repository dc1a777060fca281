"""Triton kernel of the bonus tables: what a key earns by its centroid, four tables in a word.

It also turns queries into the coordinates of the codes, and makes the numbers zero that the kernels
of the search behind it count up.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._dispatch import interpreted
from hf_kvret_kernels._triton_shared import walsh_hadamard
from hf_kvret_kernels.paris.codes import rotation_blocks, rotation_stride
from hf_kvret_kernels.paris.naive import SHARE_UNIT
from hf_kvret_kernels.paris.triton_encode import source_columns

_SHARE_UNIT = tl.constexpr(SHARE_UNIT)
# Tables whose points one load brings. Sums of points stay below 255: none reaches into the next.
PER_WORD = 4


class Bonus(NamedTuple):
    """What the kernels of a search read, and what they count in.

    Attributes:
        words: ``[B, H, Q, W, S, 2**m, 4]`` uint8: four tables side by side, those beyond G of
            zeros.
        queries: ``[B, H, Q, G, 8, P // 8]`` fp32, the rotated queries: coordinate ``8 b + j`` is at
            ``[j, b]``, so that kernels that take bytes of signs read their coordinates in a row.
        histogram: ``[B, H, Q, 256]`` int32 of zeros.
        tickets: ``[B, H, Q]`` int32 of zeros.
    """

    words: torch.Tensor
    queries: torch.Tensor
    histogram: torch.Tensor
    tickets: torch.Tensor


def by_planes(q_rot: torch.Tensor) -> torch.Tensor:
    """``Bonus.queries`` of ``[..., P]``."""
    return q_rot.unflatten(-1, (-1, 8)).mT.contiguous()


def subspaces_of_program(count: int) -> int:
    """How many of a table's ``count`` subspaces one program takes.

    One, by a warp, on a GPU: many are in flight, and nothing crosses warps. The interpreter's time
    goes with the number of operations, not of numbers, so it takes all.
    """
    return count if interpreted() else 1


def bonus(
    query: torch.Tensor,
    signs: torch.Tensor | None,
    counts: torch.Tensor,
    shares: tuple[int, ...],
    m: int,
) -> Bonus:
    """Tables of ``query [B, H, Q, G, D]``, which is in the codes' coordinates without ``signs``."""
    batch, heads, queries, tables, head_dim = query.shape
    device, rows = query.device, batch * heads * queries
    subspaces = counts.shape[2]
    dim, words = subspaces * m, triton.cdiv(tables, PER_WORD)
    lead = batch, heads, queries
    points = torch.empty(
        *lead, words, subspaces, 1 << m, PER_WORD, dtype=torch.uint8, device=device
    )
    histogram = torch.empty(*lead, 256, dtype=torch.int32, device=device)
    tickets = torch.empty(lead, dtype=torch.int32, device=device)
    if signs is None:
        planes = by_planes(query)
        source = planes
    else:
        planes = torch.empty(*lead, tables, 8, dim // 8, dtype=torch.float32, device=device)
        source = query.contiguous()
    if not rows:
        return Bonus(points, planes, histogram, tickets)
    for first, end in rotation_blocks(dim):
        own = (end - first) // m
        part = subspaces_of_program(own)
        # The long axis first: a grid has 2**31 - 1 programs there, and 65,535 on the others.
        _bonus_kernel[(rows * words * PER_WORD, own // part)](
            source,
            source if signs is None else signs.contiguous(),
            counts.contiguous(),
            planes,
            points,
            histogram,
            tickets,
            queries,
            head_dim,
            (end - first) ** -0.5,
            ROTATE=signs is not None,
            TABLES=tables,
            WORDS=words,
            PER_WORD=PER_WORD,
            SHARES=shares,
            M=m,
            SUBSPACES=subspaces,
            FIRST=first,
            DIM=end - first,
            STRIDE=rotation_stride(dim),
            PART=part,
            LOG_DIM=(end - first).bit_length() - 1,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return Bonus(points, planes, histogram, tickets)


@triton.jit
def _bonus_kernel(
    query_ptr,
    signs_ptr,
    counts_ptr,
    planes_ptr,
    points_ptr,
    histogram_ptr,
    tickets_ptr,
    queries,
    head_dim,
    scale,
    ROTATE: tl.constexpr,
    TABLES: tl.constexpr,
    WORDS: tl.constexpr,
    PER_WORD: tl.constexpr,
    SHARES: tl.constexpr,
    M: tl.constexpr,
    SUBSPACES: tl.constexpr,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    PART: tl.constexpr,
    LOG_DIM: tl.constexpr,
):
    """PART subspaces of one table: their centroids are sorted by similarity.

    They are of the block of DIM places from FIRST on, which is rotated by itself.
    """
    CENTROIDS: tl.constexpr = 1 << M
    WHOLE: tl.constexpr = SUBSPACES * M
    table = tl.program_id(0) % (WORDS * PER_WORD)
    row = (tl.program_id(0) // (WORDS * PER_WORD)).to(tl.int64)
    part = tl.program_id(1)
    subspaces = FIRST // M + part * PART + tl.arange(0, PART)[:, None]
    if (table == 0) & (part == 0) & (FIRST == 0):
        tl.store(histogram_ptr + row * 256 + tl.arange(0, 256), tl.zeros((256,), tl.int32))
        tl.store(tickets_ptr + row, 0)
    ids = tl.arange(0, CENTROIDS)[None, :]
    place = ((row * WORDS + table // PER_WORD) * SUBSPACES + subspaces) * CENTROIDS
    points_ptr += place * PER_WORD + table % PER_WORD
    if table < TABLES:
        source = row * TABLES + table
        if ROTATE:
            places = tl.arange(0, DIM)[None, :]
            columns = source_columns(FIRST + places, WHOLE, STRIDE)
            inside = columns < head_dim
            x = tl.load(query_ptr + source * head_dim + columns, mask=inside, other=0.0)
            x = x.to(tl.float32) * tl.load(signs_ptr + FIRST + places)
            x = walsh_hadamard(x, DIM, LOG_DIM, 1) * scale
            own = places // (M * PART) == part
            tl.store(planes_ptr + source * WHOLE + _plane(FIRST + places, WHOLE), x, mask=own)
            # The program reads what all its threads have written.
            tl.debug_barrier()
        sims = tl.zeros((PART, CENTROIDS), dtype=tl.float32)
        # Added in the order of the coordinates, as the reference does.
        for j in tl.static_range(M):
            value = tl.load(planes_ptr + source * WHOLE + _plane(subspaces * M + j, WHOLE))
            sims += tl.where(((ids >> j) & 1) == 1, value, -value)
        # Integers that compare as the floats do; descending, equal ones by their number.
        bits = sims.to(tl.int32, bitcast=True)
        bits = tl.where(bits == -2147483648, 0, bits)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        ranked = (_sort((-order << M) | ids, PART, M) & (CENTROIDS - 1)).to(tl.int32)
        of_head = ((row // queries) * SUBSPACES + subspaces) * CENTROIDS
        key_counts = tl.load(counts_ptr + of_head + ranked)
        before = tl.cumsum(key_counts, axis=1) - key_counts
        total = tl.sum(key_counts, axis=1).to(tl.int64)[:, None]
        points = tl.zeros((PART, CENTROIDS), dtype=tl.int32)
        for t in tl.static_range(len(SHARES)):
            reach = (total * SHARES[t] + _SHARE_UNIT - 1) // _SHARE_UNIT
            points += (before < reach).to(tl.int32)
        tl.store(points_ptr + ranked * PER_WORD, points.to(tl.uint8))
    else:
        tl.store(points_ptr + ids * PER_WORD, tl.zeros((PART, CENTROIDS), tl.uint8))


@triton.jit
def _sort(x, ROWS: tl.constexpr, LOG: tl.constexpr):
    """The rows of ``x [ROWS, 2**LOG]`` int64 in ascending order, by a bitonic network.

    As ``tl.sort``, whose exclusive or of two numbers takes the interpreter a hundred times as long
    as their sum, which serves as well.
    """
    x = tl.reshape(x, [ROWS] + [2] * LOG)
    for stage in tl.static_range(1, LOG + 1):
        for bit in tl.static_range(stage - 1, -1, -1):
            x = _exchange(x, bit, stage, LOG)
    return tl.reshape(x, [ROWS, 1 << LOG])


@triton.jit
def _exchange(x, BIT: tl.constexpr, STAGE: tl.constexpr, LOG: tl.constexpr):
    """Numbers whose places differ in BIT put in order, which bit STAGE of the places turns."""
    partner = tl.sum(x, axis=LOG - BIT, keep_dims=True) - x
    last = _bit(BIT, LOG) == 1
    if STAGE < LOG:
        last = last != (_bit(STAGE, LOG) == 1)
    return tl.where((x > partner) != last, partner, x)


@triton.jit
def _bit(BIT: tl.constexpr, LOG: tl.constexpr):
    """That bit of the places of a row."""
    return tl.reshape(tl.arange(0, 2), [1] * (LOG - BIT) + [2] + [1] * BIT)


@triton.jit
def _plane(coordinate, DIM: tl.constexpr):
    """Where a coordinate stands in ``Bonus.queries``."""
    return coordinate % 8 * (DIM // 8) + coordinate // 8
