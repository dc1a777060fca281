"""Triton kernels that look at all tokens: centroid counts and collisions."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_masks import mask_bytes, mask_strides
from hf_kvret_kernels.paris.codes import EXCLUDED
from hf_kvret_kernels.paris.triton_bonus import PER_WORD, bonus_words

_EXCLUDED = tl.constexpr(EXCLUDED)
# Sign bytes that a program of eight warps looks up, and tokens that one counts.
_TILE = 4096
_TOKENS = 1024
# Bytes that rows of scores start at multiples of.
_ALIGN = 16


def count_centroids(sign: torch.Tensor, m: int, valid: torch.Tensor | None) -> torch.Tensor:
    batch, heads, length, width = sign.shape
    shape = (batch, heads, width * 8 // m, 1 << m)
    counts = torch.zeros(shape, dtype=torch.int32, device=sign.device)
    _count_kernel[(triton.cdiv(length, _TOKENS), batch * heads, width)](
        sign,
        mask_bytes(valid, sign),
        counts,
        length,
        heads,
        *sign.stride()[:2],
        *mask_strides(valid),
        HAS_VALID=valid is not None,
        M=m,
        BYTES=width,
        BLOCK=_TOKENS,
        enable_fp_fusion=True,
    )
    return counts


def collisions(
    q_rot: torch.Tensor,
    counts: torch.Tensor,
    sign: torch.Tensor,
    shares: tuple[int, ...],
    m: int,
    valid: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.paris.collisions``."""
    histogram = torch.empty(*q_rot.shape[:3], 256, dtype=torch.int32, device=sign.device)
    # The first kernel zeroes what the second adds to.
    words = bonus_words(q_rot, counts, shares, m, histogram)
    # A bin for each sum there can be, and one for what is not counted: fewer bins, less work.
    bins = triton.next_power_of_2(len(shares) * (q_rot.shape[-1] // m) + 2)
    batch, heads, queries, count = words.shape[:4]
    length, width = sign.shape[2:]
    # Rows start at multiples of 16 bytes, for loads and stores of so many.
    stride = triton.cdiv(length, _ALIGN) * _ALIGN
    shape = (batch, heads, queries, stride)
    scores = torch.empty(shape, dtype=torch.uint8, device=sign.device)
    block = min(_TOKENS, _TILE // width)
    _collide_kernel[(triton.cdiv(length, block), batch * heads * queries)](
        sign,
        words.view(torch.int32),
        mask_bytes(valid, sign),
        scores,
        histogram,
        length,
        stride,
        heads,
        queries,
        *sign.stride()[:2],
        *mask_strides(valid),
        HAS_VALID=valid is not None,
        WORDS=count,
        PER_WORD=PER_WORD,
        BINS=max(64, bins),
        M=m,
        BYTES=width,
        BLOCK=block,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return scores[..., :length], histogram


@triton.jit(do_not_specialize=["length", "valid_stride_b"])
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
    token_mask = tokens < length
    if HAS_VALID:
        mask_ptr = valid_ptr + b * valid_stride_b + tokens * valid_stride_n
        token_mask = token_mask & (tl.load(mask_ptr, mask=token_mask, other=0) != 0)
    place = sign_ptr + b * sign_stride_b + h * sign_stride_h + tokens * BYTES + column
    byte = tl.load(place, mask=token_mask, other=0).to(tl.int32)
    # As many bins again: what is not counted goes to the first of those.
    bins = tl.arange(0, 2 * CENTROIDS)
    counts_ptr += tl.program_id(1).to(tl.int64) * (BYTES * 8 // M) * CENTROIDS
    for part in tl.static_range(8 // M):
        ids = (byte >> (part * M)) & (CENTROIDS - 1)
        bin_counts = tl.histogram(tl.where(token_mask, ids, CENTROIDS), 2 * CENTROIDS)
        row_ptr = counts_ptr + (column * (8 // M) + part) * CENTROIDS
        tl.atomic_add(row_ptr + bins, bin_counts, mask=(bins < CENTROIDS) & (bin_counts > 0))


@triton.jit(do_not_specialize=["length", "valid_stride_b"])
def _collide_kernel(
    sign_ptr,
    words_ptr,
    valid_ptr,
    scores_ptr,
    histogram_ptr,
    length,
    scores_stride,
    heads,
    queries,
    sign_stride_b,
    sign_stride_h,
    valid_stride_b,
    valid_stride_n,
    HAS_VALID: tl.constexpr,
    WORDS: tl.constexpr,
    PER_WORD: tl.constexpr,
    BINS: tl.constexpr,
    M: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of tokens for one query; a word of four bytes holds the points of four tables."""
    CENTROIDS: tl.constexpr = 1 << M
    PER_BYTE: tl.constexpr = 8 // M
    row = tl.program_id(1).to(tl.int64)
    b = row // queries // heads
    h = row // queries % heads
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token_mask = tokens < length
    if HAS_VALID:
        mask_ptr = valid_ptr + b * valid_stride_b + tokens * valid_stride_n
        token_mask = token_mask & (tl.load(mask_ptr, mask=token_mask, other=0) != 0)
    column = tl.arange(0, BYTES)[None, :]
    places = b * sign_stride_b + h * sign_stride_h + tokens[:, None] * BYTES + column
    byte = tl.load(sign_ptr + places, mask=token_mask[:, None], other=0).to(tl.int32)

    best = tl.zeros((BLOCK,), dtype=tl.int32)
    words_ptr += row * WORDS * (BYTES * PER_BYTE * CENTROIDS)
    for w in range(WORDS):
        total = tl.zeros((BLOCK,), dtype=tl.uint32)
        for part in tl.static_range(PER_BYTE):
            ids = (byte >> (part * M)) & (CENTROIDS - 1)
            entries = (w * BYTES * PER_BYTE + column * PER_BYTE + part) * CENTROIDS + ids
            words = tl.load(words_ptr + entries).to(tl.uint32, bitcast=True)
            total += tl.sum(words, axis=1)
        for table in tl.static_range(PER_WORD):
            best = tl.maximum(best, ((total >> (8 * table)) & 255).to(tl.int32))
    score = tl.where(token_mask, best, _EXCLUDED).to(tl.uint8)
    tl.store(scores_ptr + row * scores_stride + tokens, score, mask=tokens < length)

    bins = tl.arange(0, BINS)
    bin_counts = tl.histogram(tl.where(token_mask, best, BINS - 1), BINS)
    bin_mask = (bins < BINS - 1) & (bin_counts > 0)
    tl.atomic_add(histogram_ptr + row * 256 + bins, bin_counts, mask=bin_mask, sem="relaxed")
