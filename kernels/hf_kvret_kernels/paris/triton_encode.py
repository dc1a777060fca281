"""Triton kernels of ``encode`` and ``count_centroids``: a block of tokens a program."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import mask_bytes, mask_strides, walsh_hadamard
from hf_kvret_kernels.paris.codes import LEVELS, ParisCodes, rotation_blocks, rotation_stride

# Elements that a program of four warps holds in registers.
_TILE = 4096


def encode(
    keys: torch.Tensor,
    signs: torch.Tensor,
    levels: torch.Tensor,
    out: ParisCodes,
) -> None:
    batch, heads, length, head_dim = keys.shape
    dim = signs.shape[0]
    for first, end in rotation_blocks(dim):
        part = end - first
        block = min(_TILE // part, triton.next_power_of_2(max(1, length)))
        _encode_kernel[(triton.cdiv(length, block), batch * heads)](
            keys,
            signs.contiguous(),
            levels.contiguous(),
            out.sign,
            out.record,
            length,
            heads,
            head_dim,
            *keys.stride(),
            *out.sign.stride()[:2],
            *out.record.stride()[:2],
            part**-0.5,
            LEVELS=LEVELS,
            FIRST=first,
            WHOLE=dim,
            STRIDE=rotation_stride(dim),
            DIM=part,
            LOG_DIM=part.bit_length() - 1,
            BLOCK=block,
            enable_fp_fusion=True,
        )


@triton.jit
def source_columns(indices, WHOLE: tl.constexpr, STRIDE: tl.constexpr):
    """The coordinates that come to ``indices`` of the blocks, see ``codes.rotation_stride``."""
    columns = indices
    if STRIDE > 1:
        columns = indices * STRIDE % WHOLE
    return columns


@triton.jit
def _encode_kernel(
    keys_ptr, signs_ptr, levels_ptr, sign_ptr, record_ptr, length, heads, head_dim,
    keys_stride_b, keys_stride_h, keys_stride_n, keys_stride_d, sign_stride_b, sign_stride_h,
    record_stride_b, record_stride_h,
    scale,
    LEVELS: tl.constexpr, FIRST: tl.constexpr,
    WHOLE: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """DIM elements of a block, from FIRST on, of WHOLE of the codes of a block of tokens."""
    BYTES: tl.constexpr = DIM // 8
    # 64 bits: a long cache has more elements than 32 bits count.
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    indices = FIRST + tl.arange(0, DIM)[None, :]
    cols = source_columns(indices, WHOLE, STRIDE)
    inside = (tokens < length) & (cols < head_dim)

    keys_ptr += b * keys_stride_b + h * keys_stride_h
    x = tl.load(keys_ptr + tokens * keys_stride_n + cols * keys_stride_d, mask=inside, other=0.0)
    x = walsh_hadamard(x.to(tl.float32) * tl.load(signs_ptr + indices), DIM, LOG_DIM, BLOCK) * scale

    x_b = tl.reshape(x, (BLOCK, BYTES, 8))
    r = tl.sqrt(tl.sum(x_b * x_b, axis=2))
    u = tl.abs(x_b) * (1.0 / tl.where(r > 0, r, 1.0))[:, :, None]
    level_ids = tl.zeros((BLOCK, BYTES, 8), dtype=tl.int32)
    lower = tl.load(levels_ptr)
    v = tl.zeros((BLOCK, BYTES, 8), dtype=tl.float32) + lower
    for i in tl.static_range(1, LEVELS):
        upper = tl.load(levels_ptr + i)
        beyond = u > (lower + upper) / 2
        level_ids += beyond.to(tl.int32)
        v = tl.where(beyond, upper, v)
        lower = upper
    alpha = tl.sum(u * v, axis=2)
    weight = r / tl.where(alpha > 0, alpha, 1.0)
    record_ptr += b * record_stride_b + h * record_stride_h + tokens * (WHOLE // 2)
    # See ``codes.code_weights``.
    half = tl.minimum(weight, 57344.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    weight_ptr = record_ptr + 3 * WHOLE // 8 + FIRST // 8 + tl.arange(0, BYTES)[None, :]
    tl.store(weight_ptr, ((half + 64) >> 7).to(tl.uint8), mask=tokens < length)

    bit = tl.arange(0, 8)[None, None, :]
    byte = tl.sum((x_b >= 0).to(tl.int32) << bit, axis=2)
    columns = FIRST // 8 + tl.arange(0, BYTES)[None, :]
    sign_ptr += b * sign_stride_b + h * sign_stride_h + tokens * (WHOLE // 8)
    tl.store(sign_ptr + columns, byte.to(tl.uint8), mask=tokens < length)

    word = tl.sum(level_ids << (3 * bit), axis=2)
    for i in tl.static_range(3):
        part = ((word >> (8 * i)) & 255).to(tl.uint8)
        tl.store(record_ptr + 3 * columns + i, part, mask=tokens < length)


# Tokens of a program.
_TOKENS = 1024


def count_centroids(sign: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    batch, heads, length, width = sign.shape
    counts = torch.zeros(batch, heads, width, 256, dtype=torch.int32, device=sign.device)
    _count_kernel[(triton.cdiv(length, _TOKENS), batch * heads, width)](
        sign,
        mask_bytes(valid, sign),
        counts,
        length,
        heads,
        *sign.stride()[:2],
        *mask_strides(valid),
        HAS_VALID=valid is not None,
        BYTES=width,
        BLOCK=_TOKENS,
        enable_fp_fusion=True,
    )
    return counts


@triton.jit(do_not_specialize=["length", "valid_stride_b"])
def _count_kernel(
    sign_ptr, valid_ptr, counts_ptr, length, heads,
    sign_stride_b, sign_stride_h, valid_stride_b, valid_stride_n,
    HAS_VALID: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One byte column of a block of tokens: a subspace."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    column = tl.program_id(2)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token_mask = tokens < length
    if HAS_VALID:
        mask_ptr = valid_ptr + b * valid_stride_b + tokens * valid_stride_n
        token_mask = token_mask & (tl.load(mask_ptr, mask=token_mask, other=0) != 0)
    address = sign_ptr + b * sign_stride_b + h * sign_stride_h + tokens * BYTES + column
    byte = tl.load(address, mask=token_mask, other=0).to(tl.int32)
    # There are twice the bins: tokens that do not count go to the first of the second half.
    bins = tl.arange(0, 512)
    counts_ptr += (tl.program_id(1).to(tl.int64) * BYTES + column) * 256
    bin_counts = tl.histogram(tl.where(token_mask, byte, 256), 512)
    tl.atomic_add(counts_ptr + bins, bin_counts, mask=(bins < 256) & (bin_counts > 0))
