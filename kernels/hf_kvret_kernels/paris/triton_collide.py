"""Triton kernel of stage 1: points of all tokens, and what takes the most of them together.

Each program looks the points of a block of tokens up in tables that it holds in shared memory, and
counts how many of them reach each sum. The last program of a row to arrive adds these counts up: it
finds the lowest sum that is taken, and how many tokens the blocks before each block contribute.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_masks import load_mask, mask_bytes, mask_layout
from hf_kvret_kernels.paris.codes import EXCLUDED
from hf_kvret_kernels.paris.triton_bonus import PER_WORD, Bonus

_EXCLUDED = tl.constexpr(EXCLUDED)
# Sign bytes that a program of eight warps looks up at a time, and tokens of a program at most.
_TILE = 1 << 14
_TOKENS = 1024
# Bytes of a token that are looked up at a time, where they are many or no power of two.
_PIECES = (16, 8)
_WHOLE = 32
# Blocks whose counts the last program adds up at a time.
_BLOCKS = 256
# Bytes that rows of scores start at multiples of.
ALIGN = 16


class Collisions(NamedTuple):
    """Of all tokens, for each query.

    Attributes:
        scores: ``[B, H, Q, n]`` uint8. Rows begin at multiples of ``ALIGN`` bytes, and score 255
            behind their end.
        plan: ``[B, H, Q, 4]`` int32: the lowest score that is taken, how many tokens of that score
            are taken, how many in all; the fourth is not used.
        before: ``[B, H, Q, blocks, 2]`` int32: of the blocks before each block, the tokens above
            the lowest score, and on it.
        block: tokens of a block.
    """

    scores: torch.Tensor
    plan: torch.Tensor
    before: torch.Tensor
    block: int


def piece_of(width: int) -> int:
    """How many of a token's ``width`` sign bytes a program takes at a time, a power of two."""
    if width <= _WHOLE and width & (width - 1) == 0:
        return width
    return next((piece for piece in _PIECES if width % piece == 0), _PIECES[-1])


def collide(
    bonus: Bonus, sign: torch.Tensor, m: int, valid: torch.Tensor | None, points: int, count: int
) -> Collisions:
    """See ``hf_kvret_kernels.paris.collisions``; ``points`` is the highest score there can be.

    ``count`` of the highest scores are to be taken.
    """
    batch, heads, queries, words = bonus.words.shape[:4]
    length, width = sign.shape[2:]
    device, lead = sign.device, (batch, heads, queries)
    piece = piece_of(width)
    block = min(_TOKENS, _TILE // piece)
    # An empty row has a block too, which plans that nothing is taken.
    blocks = max(1, triton.cdiv(length, block))
    # A bin for each sum there can be, and one for what is not counted: fewer bins, less work.
    bins = max(64, triton.next_power_of_2(points + 2))
    # Rows start at multiples of 16 bytes, for loads and stores of so many.
    stride = triton.cdiv(length, ALIGN) * ALIGN
    scores = torch.empty(*lead, stride, dtype=torch.uint8, device=device)
    reaching = torch.empty(*lead, blocks, bins, dtype=torch.int16, device=device)
    plan = torch.empty(*lead, 4, dtype=torch.int32, device=device)
    before = torch.empty(*lead, blocks, 2, dtype=torch.int32, device=device)
    if plan.numel():
        _collide_kernel[(blocks, batch * heads * queries)](
            sign,
            bonus.words.view(torch.int32),
            mask_bytes(valid, sign),
            scores,
            bonus.histogram,
            bonus.tickets,
            reaching,
            plan,
            before,
            length,
            stride // ALIGN,
            heads,
            queries,
            count,
            *sign.stride()[:2],
            *mask_layout(valid),
            HAS_VALID=valid is not None,
            WORDS=words,
            PER_WORD=PER_WORD,
            BINS=bins,
            M=m,
            BYTES=width,
            PIECE=piece,
            BLOCK=block,
            BLOCKS=_BLOCKS,
            ALIGN=ALIGN,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return Collisions(scores[..., :length], plan, before, block)


@triton.jit(do_not_specialize=["length", "stride", "count", "valid_stride_b"])
def _collide_kernel(
    sign_ptr,
    words_ptr,
    valid_ptr,
    scores_ptr,
    histogram_ptr,
    tickets_ptr,
    reaching_ptr,
    plan_ptr,
    before_ptr,
    length,
    stride,
    heads,
    queries,
    count,
    sign_stride_b,
    sign_stride_h,
    valid_stride_b,
    valid_stride_n,
    VALID_UNIT: tl.constexpr,
    HAS_VALID: tl.constexpr,
    WORDS: tl.constexpr,
    PER_WORD: tl.constexpr,
    BINS: tl.constexpr,
    M: tl.constexpr,
    BYTES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """A block of tokens for one query; a word of four bytes holds the points of four tables."""
    OF_BYTE: tl.constexpr = 8 // M << M
    ENTRIES: tl.constexpr = BYTES * OF_BYTE
    OF_PIECE: tl.constexpr = PIECE * OF_BYTE
    row = tl.program_id(1).to(tl.int64)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    b = row // queries // heads
    h = row // queries % heads
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < length
    counted = inside
    if HAS_VALID:
        counted = load_mask(
            valid_ptr, b, tokens, length, valid_stride_b, valid_stride_n, VALID_UNIT
        )
    column = tl.arange(0, PIECE)[None, :]
    places = b * sign_stride_b + h * sign_stride_h + tokens.to(tl.int64)[:, None] * BYTES + column
    if PIECE == BYTES:
        byte = tl.load(sign_ptr + places, mask=inside[:, None], other=0).to(tl.int32)

    best = tl.zeros((BLOCK,), dtype=tl.int32)
    words_ptr += row * WORDS * ENTRIES
    for w in range(WORDS):
        total = tl.zeros((BLOCK,), dtype=tl.uint32)
        if PIECE == BYTES:
            table = tl.load(words_ptr + w * ENTRIES + tl.arange(0, ENTRIES))
            total = _add_points(total, table, byte, column, M, BLOCK, PIECE)
        else:
            # The tables of a whole token don't fit into registers on their way to shared memory.
            for first in range(0, BYTES, PIECE):
                here = inside[:, None] & (first + column < BYTES)
                byte = tl.load(sign_ptr + places + first, mask=here, other=0).to(tl.int32)
                entry = first * OF_BYTE + tl.arange(0, OF_PIECE)
                table = tl.load(words_ptr + w * ENTRIES + entry, mask=entry < ENTRIES, other=0)
                total = _add_points(total, table, byte, column, M, BLOCK, PIECE)
        for t in tl.static_range(PER_WORD):
            best = tl.maximum(best, ((total >> (8 * t)) & 255).to(tl.int32))
    score = tl.where(counted, best, _EXCLUDED).to(tl.uint8)
    # To the end of the row, in whole words.
    tl.store(scores_ptr + row * stride * ALIGN + tokens, score, mask=tokens < stride * ALIGN)

    # What is not counted goes to the last bin, which no sum reaches.
    bins = tl.arange(0, BINS)
    bin_counts = tl.histogram(tl.where(counted, best, BINS - 1), BINS)
    bin_counts = tl.where(bins < BINS - 1, bin_counts, 0)
    histogram_ptr += row * 256
    tl.atomic_add(histogram_ptr + bins, bin_counts, mask=bin_counts > 0, sem="relaxed")
    at_least = tl.sum(bin_counts, axis=0) - tl.cumsum(bin_counts, axis=0) + bin_counts
    reaching_ptr += row * blocks * BINS
    tl.store(reaching_ptr + block * BINS + bins, at_least.to(tl.int16))
    # All that the program has written is there for whoever takes a later ticket.
    tl.debug_barrier()
    if tl.atomic_add(tickets_ptr + row, 1, sem="acq_rel") == blocks - 1:
        tl.store(tickets_ptr + row, 0)
        before_ptr += row * blocks * 2
        _plan(
            histogram_ptr, reaching_ptr, plan_ptr + row * 4, before_ptr, blocks, count, BINS, BLOCKS
        )


@triton.jit
def _add_points(
    total, table, byte, column, M: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr
):
    """``total [BLOCK]`` and the words of ``table`` that ``byte [BLOCK, BYTES]`` stand for."""
    CENTROIDS: tl.constexpr = 1 << M
    PER_BYTE: tl.constexpr = 8 // M
    for part in tl.static_range(PER_BYTE):
        ids = (byte >> (part * M)) & (CENTROIDS - 1)
        entries = (column * PER_BYTE + part) * CENTROIDS + ids
        found = tl.gather(table, tl.reshape(entries, (BLOCK * BYTES,)), 0)
        found = tl.reshape(found.to(tl.uint32, bitcast=True), (BLOCK, BYTES))
        total += tl.sum(found, axis=1)
    return total


@triton.jit
def _plan(
    histogram_ptr,
    reaching_ptr,
    plan_ptr,
    before_ptr,
    blocks,
    count,
    BINS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """What is taken of a row, from what all its blocks have counted: ``plan`` and ``before``."""
    bins = tl.arange(0, BINS)
    bin_counts = tl.load(histogram_ptr + bins, cache_modifier=".cg")
    total = tl.sum(bin_counts, axis=0)
    at_least = total - tl.cumsum(bin_counts, axis=0) + bin_counts
    threshold = tl.max(tl.where((at_least >= count) & (bins < BINS - 1), bins, 0), axis=0)
    tl.store(plan_ptr, threshold)
    tl.store(plan_ptr + 1, count - tl.sum(tl.where(bins > threshold, bin_counts, 0), axis=0))
    tl.store(plan_ptr + 2, tl.minimum(total, count))
    above_before = tl.zeros((), tl.int32)
    equal_before = tl.zeros((), tl.int32)
    for start in range(0, blocks, BLOCKS):
        others = start + tl.arange(0, BLOCKS)
        mask = others < blocks
        place = reaching_ptr + others * BINS + threshold
        above = tl.load(place + 1, mask=mask, other=0, cache_modifier=".cg").to(tl.int32)
        equal = tl.load(place, mask=mask, other=0, cache_modifier=".cg").to(tl.int32) - above
        above_place = before_ptr + 2 * others
        tl.store(above_place, above_before + tl.cumsum(above, axis=0) - above, mask=mask)
        tl.store(above_place + 1, equal_before + tl.cumsum(equal, axis=0) - equal, mask=mask)
        above_before += tl.sum(above, axis=0)
        equal_before += tl.sum(equal, axis=0)
