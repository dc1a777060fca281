"""Triton kernels of look-ups: how many tokens have a code, the group's best share, the gather.

A row of the table is 16 KiB at 4096 codewords, so the look-ups of a program are served by the
cache next to it; from memory come two bytes a token, and its score goes back.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_log_sums import best_share, finite_base, log_total
from hf_kvret_kernels._triton_masks import load_mask, mask_bytes, mask_layout
from hf_kvret_kernels.relevance.triton_shares import write_best_shares

# Tokens of a program that counts or looks up.
_TOKENS = 1024
# Codewords that a program compares the heads of a group for.
_CODEWORDS = 4096
# Query heads of a group whose denominators a program sums up one after the other. Those of more
# heads, as of latent attention, are summed up by programs of their own.
_FEW_HEADS = 8


def code_counts(codes: torch.Tensor, codewords: int, valid: torch.Tensor | None) -> torch.Tensor:
    """See ``hf_kvret_kernels.codebook.code_counts``."""
    B, H, n = codes.shape
    counts = torch.zeros(B, H, codewords, dtype=torch.int32, device=codes.device)
    if codes.numel() == 0:
        return counts
    blocks = triton.cdiv(n, _TOKENS)
    _count_kernel[(B * H * blocks,)](
        codes,
        mask_bytes(valid, codes),
        counts,
        H,
        n,
        codewords,
        blocks,
        *codes.stride(),
        *mask_layout(valid),
        HAS_VALID=valid is not None,
        BLOCK=_TOKENS,
        enable_fp_fusion=True,
    )
    return counts


def best_shares(table: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``[B, H, Q, C]``: see ``hf_kvret_kernels.codebook.naive.best_shares``."""
    B, Hq, Q, C = table.shape
    H = counts.shape[1]
    shares = torch.empty(B, H, Q, C, dtype=torch.float32, device=table.device)
    if shares.numel() == 0:
        return shares
    block = min(_CODEWORDS, max(128, triton.next_power_of_2(C)))
    if Hq // H > _FEW_HEADS:
        table, lse = table.contiguous(), table.new_empty(B, Hq, Q, 1)
        _denominator_kernel[(lse.numel(),)](
            table,
            counts.contiguous(),
            lse,
            Hq // H * Q,
            C,
            BLOCK=block,
            num_warps=8,
            enable_fp_fusion=True,
        )
        write_best_shares(table, lse, shares, Q, Hq // H, 1)
        return shares
    blocks = triton.cdiv(C, block)
    _share_kernel[(B * H * Q * blocks,)](
        table.contiguous(),
        counts.contiguous(),
        shares,
        Q,
        C,
        blocks,
        G=Hq // H,
        BLOCK=block,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return shares


def lookup(table: torch.Tensor, codes: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """See ``hf_kvret_kernels.codebook.lookup``."""
    B, Hq, Q, C = table.shape
    H, n = codes.shape[1:]
    scores = torch.empty(B, Hq, Q, n, dtype=torch.float32, device=table.device)
    if scores.numel() == 0:
        return scores
    blocks = triton.cdiv(n, _TOKENS)
    _lookup_kernel[(B * H * blocks,)](
        table.contiguous(),
        codes,
        mask_bytes(valid, codes),
        scores,
        H,
        n,
        C,
        blocks,
        Hq // H * Q,
        *codes.stride(),
        *mask_layout(valid),
        HAS_VALID=valid is not None,
        BLOCK=_TOKENS,
        enable_fp_fusion=True,
    )
    return scores


@triton.jit
def _held_codes(
    codes_ptr,
    valid_ptr,
    index,
    tokens,
    heads,
    length,
    codewords,
    stride_b,
    stride_h,
    stride_n,
    valid_stride_b,
    valid_stride_n,
    VALID_UNIT: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    """``(codes, held)`` of a block of tokens; False where none is valid, or has no codeword."""
    b, h = index // heads, index % heads
    token_mask = tokens < length
    if HAS_VALID:
        token_mask = load_mask(
            valid_ptr, b, tokens, length, valid_stride_b, valid_stride_n, VALID_UNIT
        )
    codes_ptr += b * stride_b + h * stride_h
    codes = tl.load(codes_ptr + tokens * stride_n, mask=token_mask, other=-1)
    # As unsigned: one comparison then finds both ends.
    codes = codes.to(tl.uint16, bitcast=True).to(tl.int32)
    return codes, codes < codewords


@triton.jit(do_not_specialize=["length", "blocks", "stride_b", "stride_h", "valid_stride_b"])
def _count_kernel(
    codes_ptr,
    valid_ptr,
    counts_ptr,
    heads,
    length,
    codewords,
    blocks,
    stride_b,
    stride_h,
    stride_n,
    valid_stride_b,
    valid_stride_n,
    VALID_UNIT: tl.constexpr,
    HAS_VALID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes, held = _held_codes(
        codes_ptr,
        valid_ptr,
        index,
        tokens,
        heads,
        length,
        codewords,
        stride_b,
        stride_h,
        stride_n,
        valid_stride_b,
        valid_stride_n,
        VALID_UNIT,
        HAS_VALID,
    )
    tl.atomic_add(counts_ptr + index * codewords + codes, 1, mask=held, sem="relaxed")


@triton.jit
def _denominator(source, counts_ptr, codewords, BLOCK: tl.constexpr):
    """The log of the sum over tokens of a query head's exponentials, from a row of the table."""
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, codewords, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        codeword_mask = ids < codewords
        scores = tl.load(source + ids, mask=codeword_mask, other=float("-inf"))
        counts = tl.load(counts_ptr + ids, mask=codeword_mask, other=0)
        peaks = tl.maximum(peaks, tl.where(counts > 0, scores, float("-inf")))
    base = finite_base(tl.max(peaks, 0))
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, codewords, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        codeword_mask = ids < codewords
        scores = tl.load(source + ids, mask=codeword_mask, other=float("-inf"))
        counts = tl.load(counts_ptr + ids, mask=codeword_mask, other=0)
        # Codes of no token may score anything: kept out before the exponential.
        scores = tl.where(counts > 0, scores, float("-inf"))
        totals += counts.to(tl.float32) * tl.exp(scores - base)
    return log_total(base, tl.sum(totals, 0))


@triton.jit(do_not_specialize=["readers"])
def _denominator_kernel(table_ptr, counts_ptr, lse_ptr, readers, codewords, BLOCK: tl.constexpr):
    """The denominator of one query of one query head; ``readers`` queries read the same codes."""
    row = tl.program_id(0).to(tl.int64)
    counts_ptr += row // readers * codewords
    lse = _denominator(table_ptr + row * codewords, counts_ptr, codewords, BLOCK)
    tl.store(lse_ptr + row, lse)


@triton.jit(do_not_specialize=["queries", "blocks"])
def _share_kernel(
    table_ptr,
    counts_ptr,
    shares_ptr,
    queries,
    codewords,
    blocks,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest ``score - lse`` of G query heads, for a block of codewords and one query.

    Every program sums up its heads' denominators by itself: up to 4096 codewords there is but one.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    index = row // queries
    own = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    counts_ptr += index * codewords
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for g in range(G):
        source = table_ptr + ((index * G + g) * queries + row % queries) * codewords
        lse = _denominator(source, counts_ptr, codewords, BLOCK)
        scores = tl.load(source + own, mask=own < codewords, other=float("-inf"))
        best = best_share(best, scores, lse)
    tl.store(shares_ptr + row * codewords + own, best, mask=own < codewords)


@triton.jit(
    do_not_specialize=["length", "blocks", "readers", "stride_b", "stride_h", "valid_stride_b"]
)
def _lookup_kernel(
    table_ptr,
    codes_ptr,
    valid_ptr,
    scores_ptr,
    heads,
    length,
    codewords,
    blocks,
    readers,
    stride_b,
    stride_h,
    stride_n,
    valid_stride_b,
    valid_stride_n,
    VALID_UNIT: tl.constexpr,
    HAS_VALID: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of tokens of one head; its readers are the queries of its query heads, in order."""
    index = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes, held = _held_codes(
        codes_ptr,
        valid_ptr,
        index,
        tokens,
        heads,
        length,
        codewords,
        stride_b,
        stride_h,
        stride_n,
        valid_stride_b,
        valid_stride_n,
        VALID_UNIT,
        HAS_VALID,
    )
    for reader in range(readers):
        row = index * readers + reader
        scores = tl.load(table_ptr + row * codewords + codes, mask=held, other=float("-inf"))
        tl.store(scores_ptr + row * length + tokens, scores, mask=tokens < length)
