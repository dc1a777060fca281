"""Codewords in Triton: the nearest one of each token, scores of codewords, and look-ups.

**Encoding** is a matrix product with a running maximum. A program holds a block of tokens and walks
over the codewords; scores stay in registers. Where tokens are few, the codewords are shared out
among several programs, and a second kernel merges.

**The table of long codewords** is a matrix product in parts of dims and tiles of queries: rows of
latent attention are too long for a program to hold, and are read by all query heads. Shorter ones
have the kernel of ``proxy.relevance``, which reads a codeword once.

**Look-ups** count how many tokens have a code, sum up each head's exponentials, take the group's
best share, and gather. A row of the table is 16 KiB at 4096 codewords, so the look-ups of a program
are served by the cache next to it; from memory come two bytes a token, and its score goes back.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import (
    capped_scores,
    dot_dtype,
    finite_base,
    load_mask,
    log_total,
    mask_bytes,
    mask_layout,
    products,
    score_factors,
    split_plan,
)
from hf_kvret_kernels.proxy import MOST_RANK, ProxyCall, triton as proxy
from hf_kvret_kernels.relevance.triton import write_best_shares

# Numbers of a tile of 16 bits, most tokens or codewords of one; in fp32, columns multiplied
# at a time and codewords of a tile. So, compiled for sm80 and sm90, no dtype and width spills
# registers, or takes more than half of the 99 KiB of shared memory that common GPUs lend.
_TILE = 8192
_MOST_ROWS = 64
# Longest rows of 16 bits that are multiplied at once; longer ones in parts of so many columns.
_WHOLE_COLUMNS = 256
_PART_COLUMNS = 128
_FP32_COLUMNS = 32
_FP32_CODEWORDS = 32
_FEWEST_ROWS = 16
# Programs for each multiprocessor before codewords are shared out, rows that a program merges.
_WAVES = 2
_MERGE_BLOCK = 256


def encode(
    x: torch.Tensor, codebook: torch.Tensor, norms: torch.Tensor, splits: int | None = None
) -> torch.Tensor:
    """See ``hf_kvret_kernels.codebook.encode``.

    Args:
        x, codebook, norms: as there.
        splits: programs that share the codewords of one block of tokens; None for as many as
            fill the device.
    """
    B, H, n, D = x.shape
    C = codebook.shape[1]
    codes = torch.empty(B, H, n, dtype=torch.int16, device=x.device)
    if codes.numel() == 0:
        return codes
    x = x if x.stride(3) == 1 else x.contiguous()
    # Where the dtypes differ both become fp32, so that nothing is rounded.
    short = x.dtype == codebook.dtype and x.element_size() == 2
    width = max(16, min(_WHOLE_COLUMNS if short else _FP32_COLUMNS, triton.next_power_of_2(D)))
    rows = min(_MOST_ROWS if short else _FP32_CODEWORDS, _TILE // width)
    block_d = _PART_COLUMNS if short and D > _WHOLE_COLUMNS else width
    most = rows if short else _MOST_ROWS
    block_n = max(_FEWEST_ROWS, min(most, triton.next_power_of_2(n)))
    blocks, tiles = triton.cdiv(n, block_n), triton.cdiv(C, rows)
    splits, steps = split_plan(
        tiles, 1, B * H * blocks, x.device, waves=_WAVES, most=tiles, splits=splits
    )
    rows_shared = codes.numel() if splits > 1 else 0
    best = torch.empty(rows_shared, splits, dtype=torch.float32, device=x.device)
    which = torch.empty(best.shape, dtype=torch.int16, device=x.device) if splits > 1 else codes
    _encode_kernel[(B * H * blocks * splits,)](
        x,
        codebook.contiguous(),
        norms.contiguous(),
        best,
        which,
        H,
        n,
        C,
        blocks,
        splits,
        steps,
        *x.stride()[:3],
        PARTIAL=splits > 1,
        D=D,
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        BLOCK_C=rows,
        DOT_DTYPE=dot_dtype(x.dtype) if short else tl.float32,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
    )
    if splits > 1:
        _merge_kernel[(triton.cdiv(codes.numel(), _MERGE_BLOCK),)](
            best, which, codes, codes.numel(), splits, BLOCK=_MERGE_BLOCK, enable_fp_fusion=True
        )
    return codes


@triton.jit(do_not_specialize=["length", "blocks", "splits", "steps"])
def _encode_kernel(
    x_ptr, codebook_ptr, norms_ptr, best_ptr, codes_ptr, heads, length, codewords, blocks, splits,
    steps,
    stride_b, stride_h, stride_n,
    PARTIAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """A block of tokens of one head against ``steps`` tiles of codewords.

    Each lane keeps the best of the codewords that it saw, the earlier one of equals; they are
    compared with each other at the end only.
    """
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits % blocks
    index = (tl.program_id(0) // splits // blocks).to(tl.int64)
    b, h = index // heads, index % heads
    tokens = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_mask = tokens < length
    x_rows = x_ptr + b * stride_b + h * stride_h + tokens * stride_n
    codebook_ptr += h * codewords * D
    norms_ptr += h * codewords
    best = tl.full((BLOCK_N, BLOCK_C), float("-inf"), tl.float32)
    which = tl.zeros((BLOCK_N, BLOCK_C), tl.int32)
    for step in range(steps):
        ids = (split * steps + step) * BLOCK_C + tl.arange(0, BLOCK_C)
        codeword_mask = ids < codewords
        norms = tl.load(norms_ptr + ids, mask=codeword_mask, other=float("inf"))
        words = codebook_ptr + ids * D
        scores = products(
            x_rows, token_mask, words, codeword_mask, D, BLOCK_D, BLOCK_N, BLOCK_C, DOT_DTYPE
        )
        scores -= norms[None, :]
        better = scores > best
        best = tl.where(better, scores, best)
        which = tl.where(better, ids[None, :], which)
    peak = tl.max(best, 1)
    first = tl.min(tl.where(best == peak[:, None], which, 1 << 30), 1).to(tl.int16)
    target = index * length + tokens
    if PARTIAL:
        target = target * splits + split
        tl.store(best_ptr + target, peak, mask=token_mask)
    tl.store(codes_ptr + target, first, mask=token_mask)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_kernel(best_ptr, which_ptr, codes_ptr, rows, splits, BLOCK: tl.constexpr):
    """The best of each row's splits, the earlier one of equals."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    which = tl.zeros((BLOCK,), tl.int16)
    for split in range(splits):
        score = tl.load(best_ptr + row * splits + split, mask=inside, other=float("-inf"))
        code = tl.load(which_ptr + row * splits + split, mask=inside, other=0)
        better = score > best
        best = tl.where(better, score, best)
        which = tl.where(better, code, which)
    tl.store(codes_ptr + row, which, mask=inside)


# Codewords, and at most so many queries, of a program, and dims that it multiplies at a time. So
# it spills no registers on sm80 and sm90, and takes 24 KiB of shared memory for two stages.
_TABLE_CODEWORDS = 32
_MOST_READERS = 64
_FEWEST_READERS = 16
_COLUMNS = 32


def score_table(query: torch.Tensor, codebook: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """See ``hf_kvret_kernels.codebook.score_table``; of a query in fp32 that is scaled already."""
    B, Hq, Q, D = query.shape
    if D <= MOST_RANK:
        rows = codebook.contiguous().expand(B, -1, -1, -1)
        return proxy.relevance(ProxyCall(query, rows, Hq, None, softcap))
    H, C, _ = codebook.shape
    table = query.new_empty(B, Hq, Q, C)
    if table.numel() == 0:
        return table
    readers = Hq // H * Q
    block_m = max(_FEWEST_READERS, min(_MOST_READERS, triton.next_power_of_2(readers)))
    grid = (triton.cdiv(C, _TABLE_CODEWORDS), triton.cdiv(readers, block_m), B * H)
    _table_kernel[grid](
        query.contiguous(),
        codebook.contiguous(),
        table,
        H,
        C,
        readers,
        *score_factors(1.0, softcap),
        SOFTCAP=softcap is not None,
        D=D,
        BLOCK_D=_COLUMNS,
        BLOCK_M=block_m,
        BLOCK_C=_TABLE_CODEWORDS,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return table


@triton.jit(do_not_specialize=["readers"])
def _table_kernel(
    query_ptr, codebook_ptr, table_ptr, heads, codewords, readers, inner, outer,
    SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A tile of the queries that read one codebook, against a tile of its codewords."""
    index = tl.program_id(2).to(tl.int64)
    ids = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    codeword_mask, row_mask = ids < codewords, rows < readers
    query_ptr += index * readers * D
    codebook_ptr += index % heads * codewords * D
    words = codebook_ptr + ids * D
    scores = products(
        query_ptr + rows * D,
        row_mask,
        words,
        codeword_mask,
        D,
        BLOCK_D,
        BLOCK_M,
        BLOCK_C,
        tl.float32,
    )
    target = (index * readers + rows)[:, None] * codewords + ids[None, :]
    tl.store(
        table_ptr + target,
        capped_scores(scores, inner, outer, SOFTCAP),
        mask=row_mask[:, None] & codeword_mask[None, :],
    )


# Tokens of a program that counts or looks up.
_TOKENS = 1024
# Codewords whose exponentials a program adds up at a time.
_CODEWORDS = 4096


def code_counts(codes: torch.Tensor, codewords: int, valid: torch.Tensor | None) -> torch.Tensor:
    """``[B, H, C]`` int32: how many valid tokens of ``codes [B, H, n]`` have each code."""
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
    table, lse = table.contiguous(), table.new_empty(B, Hq, Q, 1)
    _denominator_kernel[(lse.numel(),)](
        table,
        counts.contiguous(),
        lse,
        Hq // H * Q,
        C,
        BLOCK=min(_CODEWORDS, max(128, triton.next_power_of_2(C))),
        num_warps=8,
        enable_fp_fusion=True,
    )
    write_best_shares(table, lse, shares, Q, Hq // H, 1)
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
def _valid_codes(
    codes_ptr, valid_ptr, index, tokens, heads, length, codewords,
    stride_b, stride_h, stride_n, valid_stride_b, valid_stride_n,
    VALID_UNIT: tl.constexpr, HAS_VALID: tl.constexpr,
):  # fmt: skip
    """``(codes, code_mask)`` of a block; False where no token is valid or has a codeword."""
    b, h = index // heads, index % heads
    token_mask = tokens < length
    if HAS_VALID:
        token_mask = load_mask(
            valid_ptr, b, tokens, length, valid_stride_b, valid_stride_n, VALID_UNIT
        )
    codes_ptr += b * stride_b + h * stride_h
    codes = tl.load(codes_ptr + tokens * stride_n, mask=token_mask, other=-1)
    # One comparison of unsigned numbers finds both ends.
    codes = codes.to(tl.uint16, bitcast=True).to(tl.int32)
    return codes, codes < codewords


@triton.jit(do_not_specialize=["length", "blocks", "stride_b", "stride_h", "valid_stride_b"])
def _count_kernel(
    codes_ptr, valid_ptr, counts_ptr, heads, length, codewords, blocks,
    stride_b, stride_h, stride_n, valid_stride_b, valid_stride_n,
    VALID_UNIT: tl.constexpr, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes, code_mask = _valid_codes(
        *(codes_ptr, valid_ptr, index, tokens, heads, length, codewords),
        *(stride_b, stride_h, stride_n, valid_stride_b, valid_stride_n, VALID_UNIT, HAS_VALID),
    )
    tl.atomic_add(counts_ptr + index * codewords + codes, 1, mask=code_mask, sem="relaxed")


@triton.jit(do_not_specialize=["readers"])
def _denominator_kernel(table_ptr, counts_ptr, lse_ptr, readers, codewords, BLOCK: tl.constexpr):
    """The log of the sum over tokens of a query's exponentials, from its row of the table.

    ``readers`` queries, those of a group of heads, read the same codes.
    """
    row = tl.program_id(0).to(tl.int64)
    table_ptr += row * codewords
    counts_ptr += row // readers * codewords
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, codewords, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        codeword_mask = ids < codewords
        scores = tl.load(table_ptr + ids, mask=codeword_mask, other=float("-inf"))
        counts = tl.load(counts_ptr + ids, mask=codeword_mask, other=0)
        peaks = tl.maximum(peaks, tl.where(counts > 0, scores, float("-inf")))
    base = finite_base(tl.max(peaks, 0))
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, codewords, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        codeword_mask = ids < codewords
        scores = tl.load(table_ptr + ids, mask=codeword_mask, other=float("-inf"))
        counts = tl.load(counts_ptr + ids, mask=codeword_mask, other=0)
        # Codes of no token may score anything: kept out before the exponential.
        scores = tl.where(counts > 0, scores, float("-inf"))
        totals += counts.to(tl.float32) * tl.exp(scores - base)
    tl.store(lse_ptr + row, log_total(base, tl.sum(totals, 0)))


@triton.jit(
    do_not_specialize=["length", "blocks", "readers", "stride_b", "stride_h", "valid_stride_b"]
)
def _lookup_kernel(
    table_ptr, codes_ptr, valid_ptr, scores_ptr, heads, length, codewords, blocks, readers,
    stride_b, stride_h, stride_n, valid_stride_b, valid_stride_n,
    VALID_UNIT: tl.constexpr, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of tokens of one head; its readers are the queries of its query heads, in order."""
    index = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes, code_mask = _valid_codes(
        *(codes_ptr, valid_ptr, index, tokens, heads, length, codewords),
        *(stride_b, stride_h, stride_n, valid_stride_b, valid_stride_n, VALID_UNIT, HAS_VALID),
    )
    for reader in range(readers):
        row = index * readers + reader
        scores = tl.load(table_ptr + row * codewords + codes, mask=code_mask, other=float("-inf"))
        tl.store(scores_ptr + row * length + tokens, scores, mask=tokens < length)
