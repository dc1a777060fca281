"""Decoding in Triton: a program takes some groups of one row's numbers at a time, in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import walsh_hadamard
from hf_kvret_kernels.higgs.packing import WORDS
from hf_kvret_kernels.higgs.triton_tiles import load_numbers

# Numbers that a program of four warps holds in registers.
_TILE = 4096


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    group: int,
    code_bits: int,
    signs: torch.Tensor | None = None,
    grid: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[n, W]`` of ``dtype`` from ``codes [n, ...]`` and ``scales [n, ...]``, both uint8.

    Args:
        signs: ``[group]`` fp32, grid: ``[points]`` int32 of ``grid_words`` in fp16; both for HIGGS,
            None for min-max.
    """
    per_word, planes = WORDS[code_bits]
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    scales = scales if scales.stride(1) == 1 else scales.contiguous()
    row_words = codes.shape[1] // planes
    higgs = signs is not None and grid is not None
    row_groups = row_words * per_word * (2 if higgs else 1) // group
    out = torch.empty(len(codes), row_groups * group, dtype=dtype, device=codes.device)
    groups = len(codes) * row_groups
    if groups == 0:
        return out
    block = min(_TILE // group, triton.next_power_of_2(groups))
    _decode_kernel[(triton.cdiv(groups, block),)](
        codes,
        scales,
        signs if higgs else codes,
        grid if higgs else codes,
        out,
        groups,
        row_groups,
        row_words,
        codes.stride(0),
        scales.stride(0),
        group**-0.5,
        GROUP=group,
        LOG_GROUP=group.bit_length() - 1,
        BLOCK=block,
        CODE_BITS=code_bits,
        PER_WORD=per_word,
        PLANES=planes,
        HIGGS=higgs,
        EVEN=scales.stride(0) % 2 == 0 and scales.data_ptr() % 2 == 0,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["groups"])
def _decode_kernel(
    codes_ptr,
    scales_ptr,
    signs_ptr,
    grid_ptr,
    out_ptr,
    groups,
    row_groups,
    row_words,
    codes_stride,
    scales_stride,
    factor,
    GROUP: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PLANES: tl.constexpr,
    HIGGS: tl.constexpr,
    EVEN: tl.constexpr,
):
    GROUP_WORDS: tl.constexpr = GROUP // (2 * PER_WORD) if HIGGS else GROUP // PER_WORD
    SCALE_BYTES: tl.constexpr = 2 if HIGGS else 4
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < groups
    row, place = index // row_groups, index % row_groups
    first = codes_ptr + row * codes_stride + place * GROUP_WORDS
    scales = scales_ptr + row * scales_stride + place * SCALE_BYTES
    x = load_numbers(
        first[:, None],
        scales[:, None],
        inside,
        row_words,
        grid_ptr,
        1,
        GROUP,
        BLOCK,
        1,
        CODE_BITS,
        PER_WORD,
        PLANES,
        HIGGS,
        EVEN,
    )
    columns = tl.arange(0, GROUP)[None, :]
    if HIGGS:
        x = walsh_hadamard(x, GROUP, LOG_GROUP, BLOCK) * factor * tl.load(signs_ptr + columns)
    target = out_ptr + index[:, None] * GROUP + columns
    tl.store(target, x.to(out_ptr.dtype.element_ty), mask=inside[:, None])
