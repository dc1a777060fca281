"""Encoding in Triton: a program takes some groups, reads them once and writes codes and scales."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import walsh_hadamard
from hf_kvret_kernels.higgs.naive import HALF_MAX
from hf_kvret_kernels.higgs.packing import WORDS
from hf_kvret_kernels.higgs.triton_tiles import store_codes

# Numbers that a program of four warps holds in registers.
_TILE = 4096


def higgs_encode(
    rows: torch.Tensor, signs: torch.Tensor, merits: torch.Tensor, group: int, code_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes [n, W * bits / 8] uint8, scales [n, W / group] fp16)`` of contiguous ``[n, W]``.

    Args:
        signs: ``[group]`` fp32.
        merits: ``[points, 3]`` fp32 of ``grid_merits``.
        code_bits: of the code of a pair.
    """
    per_word, planes = WORDS[code_bits]
    length, width = rows.shape
    codes = torch.empty(length, width * code_bits // 16, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(length, width // group, dtype=torch.float16, device=rows.device)
    groups = scales.numel()
    if groups == 0:
        return codes, scales
    block = min(_TILE // group, triton.next_power_of_2(groups))
    _higgs_kernel[(triton.cdiv(groups, block),)](
        rows,
        signs,
        merits,
        codes,
        scales,
        groups,
        width // group,
        group**-0.5,
        HALF_MAX,
        POINTS=len(merits),
        GROUP=group,
        LOG_GROUP=group.bit_length() - 1,
        BLOCK=block,
        CODE_BITS=code_bits,
        PER_WORD=per_word,
        PLANES=planes,
        enable_fp_fusion=True,
    )
    return codes, scales


def minmax_encode(rows: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes [n, W * bits / 8] uint8, scales [n, 2 * W / group] fp16)`` of contiguous rows."""
    per_word, planes = WORDS[bits]
    length, width = rows.shape
    codes = torch.empty(length, width * bits // 8, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(length, 2 * width // group, dtype=torch.float16, device=rows.device)
    groups = scales.numel() // 2
    if groups == 0:
        return codes, scales
    block = min(_TILE // group, triton.next_power_of_2(groups))
    _minmax_kernel[(triton.cdiv(groups, block),)](
        rows,
        codes,
        scales,
        groups,
        width // group,
        HALF_MAX,
        GROUP=group,
        BLOCK=block,
        CODE_BITS=bits,
        PER_WORD=per_word,
        PLANES=planes,
        enable_fp_fusion=True,
    )
    return codes, scales


@triton.jit
def _store_groups(
    codes_ptr,
    codes,
    index,
    inside,
    row_groups,
    ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Store ``codes [ROWS, NUMBERS]`` of the groups that are numbered ``index [ROWS]``."""
    WORDS: tl.constexpr = NUMBERS // PER_WORD
    row, place = index // row_groups, index % row_groups
    row_words = row_groups * WORDS
    target = codes_ptr + row * row_words * PLANES + place * WORDS
    target = target[:, None] + tl.arange(0, WORDS)[None, :]
    store_codes(
        target, codes, inside[:, None], row_words, ROWS, NUMBERS, CODE_BITS, PER_WORD, PLANES
    )


@triton.jit(do_not_specialize=["groups"])
def _higgs_kernel(
    x_ptr,
    signs_ptr,
    merits_ptr,
    codes_ptr,
    scales_ptr,
    groups,
    row_groups,
    factor,
    half_max,
    POINTS: tl.constexpr,
    GROUP: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PLANES: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < groups
    columns = tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + index[:, None] * GROUP + columns, mask=inside[:, None], other=0.0)
    x = x.to(tl.float32)
    energy = tl.sum(x * x, axis=1)
    finite = energy < float("inf")
    scales = tl.minimum(tl.sqrt(energy / GROUP), half_max).to(tl.float16)
    half_scales = tl.where(finite, scales.to(tl.float32), float("nan")).to(tl.float16)
    tl.store(scales_ptr + index, half_scales, mask=inside)

    divisors = tl.where(finite, scales.to(tl.float32), 0.0)
    inverse = tl.where(divisors > 0, 1.0 / tl.where(divisors > 0, divisors, 1.0), 0.0)
    x = tl.where(finite[:, None], x, 0.0) * tl.load(signs_ptr + columns)
    x = walsh_hadamard(x, GROUP, LOG_GROUP, BLOCK) * factor * inverse[:, None]
    first, second = tl.split(tl.reshape(x, (BLOCK, GROUP // 2, 2)))
    best = tl.full((BLOCK, GROUP // 2), float("-inf"), tl.float32)
    codes = tl.zeros((BLOCK, GROUP // 2), tl.int32)
    for point in range(POINTS):
        merit = first * tl.load(merits_ptr + 3 * point)
        merit += second * tl.load(merits_ptr + 3 * point + 1) - tl.load(merits_ptr + 3 * point + 2)
        better = merit > best
        best = tl.where(better, merit, best)
        codes = tl.where(better, point, codes)
    _store_groups(
        codes_ptr,
        codes,
        index,
        inside,
        row_groups,
        BLOCK,
        GROUP // 2,
        CODE_BITS,
        PER_WORD,
        PLANES,
    )


@triton.jit(do_not_specialize=["groups"])
def _minmax_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    groups,
    row_groups,
    half_max,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PLANES: tl.constexpr,
):
    MOST: tl.constexpr = (1 << CODE_BITS) - 1
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < groups
    columns = tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + index[:, None] * GROUP + columns, mask=inside[:, None], other=0.0)
    x = x.to(tl.float32)
    finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=1) > 0
    x = tl.where(finite[:, None], x, 0.0)
    zeros = tl.minimum(tl.maximum(tl.min(x, axis=1), -half_max), half_max).to(tl.float16)
    zeros = zeros.to(tl.float32)
    x -= zeros[:, None]
    steps = tl.minimum(tl.maximum(tl.max(x, axis=1) / MOST, 0.0), half_max).to(tl.float16)
    steps = steps.to(tl.float32)
    inverse = tl.where(steps > 0, 1.0 / tl.where(steps > 0, steps, 1.0), 0.0)
    codes = tl.floor(x * inverse[:, None] + 0.5)
    codes = tl.minimum(tl.maximum(codes, 0.0), MOST * 1.0).to(tl.int32)
    steps = tl.where(finite, steps, float("nan")).to(tl.float16)
    zeros = tl.where(finite, zeros, float("nan")).to(tl.float16)
    tl.store(scales_ptr + 2 * index, steps, mask=inside)
    tl.store(scales_ptr + 2 * index + 1, zeros, mask=inside)
    _store_groups(
        codes_ptr, codes, index, inside, row_groups, BLOCK, GROUP, CODE_BITS, PER_WORD, PLANES
    )
