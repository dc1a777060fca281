"""Encoding and decoding in Triton: a program takes some groups of numbers at a time, in registers.

CODE_BITS, PER_WORD and PLANES say how codes lie in bytes, see ``naive.pack``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import walsh_hadamard
from hf_kvret_kernels.higgs.naive import HALF_MAX, WORDS

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


@triton.jit(do_not_specialize=["groups"])
def _higgs_kernel(
    x_ptr, signs_ptr, merits_ptr, codes_ptr, scales_ptr, groups, row_groups, factor, half_max,
    POINTS: tl.constexpr, GROUP: tl.constexpr, LOG_GROUP: tl.constexpr, BLOCK: tl.constexpr,
    CODE_BITS: tl.constexpr, PER_WORD: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
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
    store_codes(
        *(codes_ptr, codes, index, inside, row_groups),
        *(BLOCK, GROUP // 2, CODE_BITS, PER_WORD, PLANES),
    )


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    group: int,
    code_bits: int,
    signs: torch.Tensor,
    grid: torch.Tensor,
) -> torch.Tensor:
    """``[n, W]`` of ``dtype`` from ``codes [n, ...]`` and ``scales [n, ...]``, both uint8.

    Args:
        signs: ``[group]`` fp32.
        grid: ``[points]`` int32 of ``grid_words`` in fp16.
    """
    per_word, planes = WORDS[code_bits]
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    scales = scales if scales.stride(1) == 1 else scales.contiguous()
    row_words = codes.shape[1] // planes
    row_groups = 2 * row_words * per_word // group
    out = torch.empty(len(codes), row_groups * group, dtype=dtype, device=codes.device)
    groups = len(codes) * row_groups
    if groups == 0:
        return out
    block = min(_TILE // group, triton.next_power_of_2(groups))
    _decode_kernel[(triton.cdiv(groups, block),)](
        codes,
        scales,
        signs,
        grid,
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
        EVEN=scales.stride(0) % 2 == 0 and scales.data_ptr() % 2 == 0,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["groups"])
def _decode_kernel(
    codes_ptr, scales_ptr, signs_ptr, grid_ptr, out_ptr, groups, row_groups, row_words,
    codes_stride, scales_stride, factor,
    GROUP: tl.constexpr, LOG_GROUP: tl.constexpr, BLOCK: tl.constexpr, CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr, PLANES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    GROUP_WORDS: tl.constexpr = GROUP // (2 * PER_WORD)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < groups
    row, offset = index // row_groups, index % row_groups
    first = codes_ptr + row * codes_stride + offset * GROUP_WORDS
    scales = scales_ptr + row * scales_stride + offset * 2
    x = load_numbers(
        *(first[:, None], scales[:, None], inside, row_words, grid_ptr),
        *(1, GROUP, BLOCK, 1, CODE_BITS, PER_WORD, PLANES, EVEN),
    )
    columns = tl.arange(0, GROUP)[None, :]
    x = walsh_hadamard(x, GROUP, LOG_GROUP, BLOCK) * factor * tl.load(signs_ptr + columns)
    target = out_ptr + index[:, None] * GROUP + columns
    tl.store(target, x.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def load_words(bytes_ptr, mask, plane_stride, PLANES: tl.constexpr):
    """int32 words whose lowest bytes are at ``bytes_ptr``; 0 outside ``mask``."""
    words = tl.load(bytes_ptr, mask=mask, other=0).to(tl.int32)
    for plane in tl.static_range(1, PLANES):
        part = tl.load(bytes_ptr + plane * plane_stride, mask=mask, other=0)
        words |= part.to(tl.int32) << (8 * plane)
    return words


@triton.jit
def store_codes(
    codes_ptr, codes, index, inside, row_groups,
    ROWS: tl.constexpr, NUMBERS: tl.constexpr, CODE_BITS: tl.constexpr, PER_WORD: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    """Pack ``codes [ROWS, NUMBERS]`` int32 of the groups that are numbered ``index [ROWS]``."""
    WORDS: tl.constexpr = NUMBERS // PER_WORD
    row, offset = index // row_groups, index % row_groups
    plane_stride = row_groups * WORDS
    target = codes_ptr + row * plane_stride * PLANES + offset * WORDS
    target = target[:, None] + tl.arange(0, WORDS)[None, :]
    shifts = CODE_BITS * tl.arange(0, PER_WORD)
    words = tl.sum(tl.reshape(codes, (ROWS, WORDS, PER_WORD)) << shifts[None, None, :], axis=2)
    for plane in tl.static_range(PLANES):
        part = ((words >> (8 * plane)) & 255).to(tl.uint8)
        tl.store(target + plane * plane_stride, part, mask=inside[:, None])


@triton.jit
def load_halves(bytes_ptr, mask, EVEN: tl.constexpr):
    """fp32 of the fp16 numbers whose low bytes are at ``bytes_ptr``; 0 outside ``mask``.

    EVEN promises even addresses: a number then is one load, not two.
    """
    if EVEN:
        numbers = tl.load(bytes_ptr.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0)
    else:
        low = tl.load(bytes_ptr, mask=mask, other=0).to(tl.int16)
        high = tl.load(bytes_ptr + 1, mask=mask, other=0).to(tl.int16)
        numbers = (low | (high << 8)).to(tl.float16, bitcast=True)
    return numbers.to(tl.float32)


@triton.jit
def _codes_of(
    words, ROWS: tl.constexpr, WORDS: tl.constexpr, CODE_BITS: tl.constexpr, PER_WORD: tl.constexpr
):
    """int32 ``[ROWS, WORDS * PER_WORD]``: the codes of ``words [ROWS, WORDS]``."""
    shifts = CODE_BITS * tl.arange(0, PER_WORD)
    codes = (words[:, :, None] >> shifts[None, None, :]) & ((1 << CODE_BITS) - 1)
    return tl.reshape(codes, (ROWS, WORDS * PER_WORD))


@triton.jit
def _points_of(codes, grid_ptr, PAIR: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr):
    """``[ROWS, NUMBERS]`` of PAIR, fp16 or bf16: points of a grid that has numbers of PAIR."""
    # A point is one word: x in its low half, y in its high half.
    points = tl.load(grid_ptr + codes)
    x = points.to(tl.int16).to(PAIR, bitcast=True)
    y = (points >> 16).to(tl.int16).to(PAIR, bitcast=True)
    return tl.reshape(tl.join(x, y), (ROWS, NUMBERS))


@triton.jit
def load_points(
    codes_ptr, rows_mask, plane_stride, grid_ptr,
    PAIR: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr, CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """``[ROWS, NUMBERS]`` of PAIR: coded numbers that nobody has scaled yet.

    Arguments as of ``load_numbers`` and ``_points_of``; rows outside ``rows_mask`` hold some point.
    """
    WORDS: tl.constexpr = NUMBERS // (2 * PER_WORD)
    columns = tl.arange(0, WORDS)[None, :]
    words = load_words(codes_ptr + columns, rows_mask[:, None], plane_stride, PLANES)
    codes = _codes_of(words, ROWS, WORDS, CODE_BITS, PER_WORD)
    return _points_of(codes, grid_ptr, PAIR, ROWS, NUMBERS)


@triton.jit
def load_numbers(
    codes_ptr, scales_ptr, rows_mask, plane_stride, grid_ptr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    CODE_BITS: tl.constexpr, PER_WORD: tl.constexpr, PLANES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """fp32 ``[ROWS, BLOCK_GROUPS * GROUP]``: coded numbers, which are transformed still.

    Those beyond GROUPS groups and outside ``rows_mask`` are 0.

    Args:
        codes_ptr: ``[ROWS, 1]`` pointers to the codes of rows of whole groups.
        scales_ptr: ``[ROWS, 1]`` pointers to the bytes of their scales; EVEN if these are so.
    """
    NUMBERS: tl.constexpr = BLOCK_GROUPS * GROUP
    WORDS: tl.constexpr = NUMBERS // (2 * PER_WORD)
    KNOWN: tl.constexpr = GROUPS * WORDS // BLOCK_GROUPS
    columns = tl.arange(0, WORDS)[None, :]
    mask = rows_mask[:, None] & (columns < KNOWN)
    words = load_words(codes_ptr + columns, mask, plane_stride, PLANES)
    codes = _codes_of(words, ROWS, WORDS, CODE_BITS, PER_WORD)
    numbers = _points_of(codes, grid_ptr, tl.float16, ROWS, NUMBERS).to(tl.float32)
    groups = tl.arange(0, BLOCK_GROUPS)[None, :]
    mask = rows_mask[:, None] & (groups < GROUPS)
    scales = load_halves(scales_ptr + groups * 2, mask, EVEN)
    numbers = tl.reshape(numbers, (ROWS, BLOCK_GROUPS, GROUP)) * scales[:, :, None]
    return tl.reshape(numbers, (ROWS, NUMBERS))


@triton.jit
def transform_groups(
    x, signs, factor,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, LOG_GROUP: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Signed orthonormal Hadamard transform of each group of ``x [ROWS, GROUPS * GROUP]``."""
    if not BACK:
        x = x * signs
    x = tl.reshape(x, (ROWS * GROUPS, GROUP))
    x = walsh_hadamard(x, GROUP, LOG_GROUP, ROWS * GROUPS) * factor
    x = tl.reshape(x, (ROWS, GROUPS * GROUP))
    if BACK:
        x = x * signs
    return x


@triton.jit
def load_side(
    codes, scales, id_mask, grid_ptr,
    BYTES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, CODE_BITS: tl.constexpr, PER_WORD: tl.constexpr,
    PLANES: tl.constexpr, EVEN: tl.constexpr, PAIR: tl.constexpr, ONE_GROUP: tl.constexpr,
):  # fmt: skip
    """Keys or values ``[K, BLOCK_GROUPS * GROUP]``, and factors ``[1, K]`` that they still lack.

    A scale of a whole row is such a factor: it is cheaper in the products than in each number.
    """
    if ONE_GROUP:
        numbers = load_points(
            *(codes, id_mask, BYTES // PLANES, grid_ptr),
            *(PAIR, BLOCK_K, GROUP, CODE_BITS, PER_WORD, PLANES),
        )
        factors = tl.trans(load_halves(scales, id_mask[:, None], EVEN))
    else:
        numbers = load_numbers(
            *(codes, scales, id_mask, BYTES // PLANES, grid_ptr),
            *(GROUPS, GROUP, BLOCK_K, BLOCK_GROUPS, CODE_BITS, PER_WORD, PLANES, EVEN),
        )
        factors = tl.full([1, BLOCK_K], 1.0, tl.float32)
    return numbers, factors
