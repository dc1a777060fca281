"""Triton kernels that find the nearest codeword: a matrix product with a running maximum.

A program holds a block of tokens and walks over the codewords; scores stay in registers. Where
tokens are few, the codewords are shared out among several programs, and a second kernel merges.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import dot_dtype, split_plan

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
            best,
            which,
            codes,
            codes.numel(),
            splits,
            BLOCK=_MERGE_BLOCK,
            enable_fp_fusion=True,
        )
    return codes


@triton.jit(do_not_specialize=["length", "blocks", "splits", "steps"])
def _encode_kernel(
    x_ptr,
    codebook_ptr,
    norms_ptr,
    best_ptr,
    codes_ptr,
    heads,
    length,
    codewords,
    blocks,
    splits,
    steps,
    stride_b,
    stride_h,
    stride_n,
    PARTIAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
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
        scores = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
        for first in range(0, D, BLOCK_D):
            columns = first + tl.arange(0, BLOCK_D)
            inside = columns < D
            x = tl.load(
                x_rows[:, None] + columns[None, :],
                mask=token_mask[:, None] & inside[None, :],
                other=0.0,
            )
            words = tl.load(
                codebook_ptr + ids[:, None] * D + columns[None, :],
                mask=codeword_mask[:, None] & inside[None, :],
                other=0.0,
            )
            scores = tl.dot(
                x.to(DOT_DTYPE), tl.trans(words).to(DOT_DTYPE), scores, input_precision="tf32x3"
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
