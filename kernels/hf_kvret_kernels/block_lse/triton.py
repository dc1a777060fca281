"""Sums of blocks in Triton: a program takes one block of keys and queries of all its heads."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._dispatch import DenseCall
from hf_kvret_kernels._triton_shared import (
    LOG2_E,
    Columns,
    capped_scores,
    dot_dtype,
    finite_base,
    load_rows,
    mask_bytes,
    mask_strides,
    score_factors,
    softmax_lse,
)


@triton.jit(do_not_specialize=["queries", "tokens", "blocks"])
def _block_lse_kernel(
    query, key, positions, valid, lse, strides, heads, queries, tokens, blocks, inner, outer,
    G: tl.constexpr, DK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MAIN: tl.constexpr, BLOCK_DK: tl.constexpr, REST: tl.constexpr, KEY_ROW: tl.constexpr,
    VALID_STRIDE: tl.constexpr, VALID: tl.constexpr, SOFTCAP: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    # Rows are heads of the group, and their queries behind one another.
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < G * queries
    head, q_index = h * G + row // queries, (row % queries).to(tl.int64)
    token = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = token < tokens

    columns = tl.arange(0, BLOCK_DK)
    q_rows = query + b * strides[0] + head[:, None] * strides[1] + q_index[:, None] * strides[2]
    k_rows = key + b * strides[3] + h * strides[4] + token[:, None].to(tl.int64) * KEY_ROW
    q = load_rows(q_rows + columns[None, :], real, columns, MAIN, BLOCK_DK, True)
    k = load_rows(k_rows + columns[None, :], inside, columns, MAIN, BLOCK_DK, True)
    dots = tl.dot(q.to(DOT_DTYPE), tl.trans(k).to(DOT_DTYPE), input_precision="ieee")
    if REST:
        columns = tl.arange(0, REST)
        q = load_rows(q_rows + MAIN + columns[None, :], real, columns, DK - MAIN, REST, True)
        k = load_rows(k_rows + MAIN + columns[None, :], inside, columns, DK - MAIN, REST, True)
        dots = tl.dot(q.to(DOT_DTYPE), tl.trans(k).to(DOT_DTYPE), dots, input_precision="ieee")
    scores = capped_scores(dots, inner, outer, SOFTCAP)
    last = tl.load(positions + b * queries + q_index, mask=real, other=-1)
    seen = inside[None, :] & (token[None, :] <= last[:, None])
    if VALID:
        own = tl.load(valid + b * strides[5] + token * VALID_STRIDE, mask=inside, other=0)
        seen = seen & (own != 0)[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.max(scores, 1)
    total = tl.sum(tl.exp2(scores - finite_base(peak)[:, None]), 1)
    target = ((b * heads * G + head) * queries + q_index) * blocks + block
    tl.store(lse + target, softmax_lse(peak, total), mask=real)


def block_lse(call: DenseCall, positions: torch.Tensor, block: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.block_lse.block_lse``."""
    query, key, valid = call.query, call.key, call.valid
    batch, heads, tokens, dim = key.shape
    queries, group = query.shape[2], query.shape[1] // heads
    blocks, columns = triton.cdiv(tokens, block), Columns.of(dim)
    lse = torch.empty(*query.shape[:3], blocks, dtype=torch.float32, device=query.device)
    if not lse.numel():
        return lse
    rows = min(64, max(16, triton.next_power_of_2(group * queries)))
    _block_lse_kernel[(blocks, batch * heads, triton.cdiv(group * queries, rows))](
        query,
        key,
        positions.contiguous(),
        mask_bytes(valid, query),
        lse,
        (*query.stride()[:3], *key.stride()[:2], mask_strides(valid)[0]),
        heads,
        queries,
        tokens,
        blocks,
        *score_factors(call.scale, call.softcap, LOG2_E),
        G=group,
        DK=dim,
        BLOCK_M=rows,
        BLOCK_N=block,
        MAIN=columns.main,
        BLOCK_DK=columns.block,
        REST=columns.rest,
        KEY_ROW=key.stride(2),
        VALID_STRIDE=mask_strides(valid)[1],
        VALID=valid is not None,
        SOFTCAP=call.softcap is not None,
        DOT_DTYPE=dot_dtype(query.dtype),
        enable_fp_fusion=True,
    )
    return lse
