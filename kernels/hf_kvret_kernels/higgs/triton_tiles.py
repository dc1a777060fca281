"""Pieces that the Triton kernels of coded rows share: words, codes, scales, numbers of them.

CODE_BITS, PER_WORD and PLANES say how codes lie in bytes, see ``packing``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import walsh_hadamard


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
    bytes_ptr,
    codes,
    mask,
    plane_stride,
    ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Pack ``codes [ROWS, NUMBERS]`` int32; lowest bytes go to ``bytes_ptr``, one for each word."""
    parts = tl.reshape(codes, (ROWS, NUMBERS // PER_WORD, PER_WORD))
    shifts = CODE_BITS * tl.arange(0, PER_WORD)
    words = tl.sum(parts << shifts[None, None, :], axis=2)
    for plane in tl.static_range(PLANES):
        part = ((words >> (8 * plane)) & 255).to(tl.uint8)
        tl.store(bytes_ptr + plane * plane_stride, part, mask=mask)


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
    words,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
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
    codes_ptr,
    rows_mask,
    plane_stride,
    grid_ptr,
    PAIR: tl.constexpr,
    ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PLANES: tl.constexpr,
):
    """``[ROWS, NUMBERS]`` of PAIR: coded numbers of HIGGS that nobody has scaled yet.

    Arguments as of ``load_numbers`` and ``_points_of``; rows outside ``rows_mask`` hold some point.
    """
    WORDS: tl.constexpr = NUMBERS // (2 * PER_WORD)
    columns = tl.arange(0, WORDS)[None, :]
    words = load_words(codes_ptr + columns, rows_mask[:, None], plane_stride, PLANES)
    codes = _codes_of(words, ROWS, WORDS, CODE_BITS, PER_WORD)
    return _points_of(codes, grid_ptr, PAIR, ROWS, NUMBERS)


@triton.jit
def load_numbers(
    codes_ptr,
    scales_ptr,
    rows_mask,
    plane_stride,
    grid_ptr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PLANES: tl.constexpr,
    HIGGS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """fp32 ``[ROWS, BLOCK_GROUPS * GROUP]``: coded numbers, transformed still if it is HIGGS.

    Those beyond GROUPS groups and outside ``rows_mask`` are 0.

    Args:
        codes_ptr: ``[ROWS, 1]`` pointers to the codes of rows of whole groups.
        scales_ptr: ``[ROWS, 1]`` pointers to the bytes of their scales; EVEN if these are so.
    """
    NUMBERS: tl.constexpr = BLOCK_GROUPS * GROUP
    WORDS: tl.constexpr = NUMBERS // (2 * PER_WORD) if HIGGS else NUMBERS // PER_WORD
    KNOWN: tl.constexpr = GROUPS * WORDS // BLOCK_GROUPS
    SCALE_BYTES: tl.constexpr = 2 if HIGGS else 4
    columns = tl.arange(0, WORDS)[None, :]
    mask = rows_mask[:, None] & (columns < KNOWN)
    words = load_words(codes_ptr + columns, mask, plane_stride, PLANES)
    codes = _codes_of(words, ROWS, WORDS, CODE_BITS, PER_WORD)
    if HIGGS:
        numbers = _points_of(codes, grid_ptr, tl.float16, ROWS, NUMBERS).to(tl.float32)
    else:
        numbers = codes.to(tl.float32)
    groups = tl.arange(0, BLOCK_GROUPS)[None, :]
    mask = rows_mask[:, None] & (groups < GROUPS)
    steps = load_halves(scales_ptr + groups * SCALE_BYTES, mask, EVEN)
    numbers = tl.reshape(numbers, (ROWS, BLOCK_GROUPS, GROUP)) * steps[:, :, None]
    if not HIGGS:
        zeros = load_halves(scales_ptr + groups * SCALE_BYTES + 2, mask, EVEN)
        numbers += zeros[:, :, None]
    return tl.reshape(numbers, (ROWS, NUMBERS))


@triton.jit
def transform_groups(
    x,
    signs,
    factor,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    BACK: tl.constexpr,
):
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
    codes,
    scales,
    id_mask,
    grid_ptr,
    BYTES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    CODE_BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    PLANES: tl.constexpr,
    HIGGS: tl.constexpr,
    EVEN: tl.constexpr,
    PAIR: tl.constexpr,
    ONE_GROUP: tl.constexpr,
):
    """Keys or values ``[K, BLOCK_GROUPS * GROUP]``, and factors ``[1, K]`` that they still lack.

    A scale of a whole row is such a factor: it is cheaper in the products than in each number.
    """
    if ONE_GROUP:
        numbers = load_points(
            codes,
            id_mask,
            BYTES // PLANES,
            grid_ptr,
            PAIR,
            BLOCK_K,
            GROUP,
            CODE_BITS,
            PER_WORD,
            PLANES,
        )
        factors = tl.trans(load_halves(scales, id_mask[:, None], EVEN))
    else:
        numbers = load_numbers(
            codes,
            scales,
            id_mask,
            BYTES // PLANES,
            grid_ptr,
            GROUPS,
            GROUP,
            BLOCK_K,
            BLOCK_GROUPS,
            CODE_BITS,
            PER_WORD,
            PLANES,
            HIGGS,
            EVEN,
        )
        factors = tl.full([1, BLOCK_K], 1.0, tl.float32)
    return numbers, factors
