"""Block-wise attention in Triton, after FlashAttention-2 (Dao 2023).

The G query heads of a group are folded into the rows of a tile, row ``q * G + g``, so keys and
values are read once per kv head. Where queries are few, the keys are split over several
programs and a second kernel merges the pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels import tuning
from hf_kvret_kernels._triton_masks import mask_bytes, mask_strides
from hf_kvret_kernels._triton_shared import (
    LOG2_E,
    TL_DTYPES,
    capped_scores,
    combine_splits,
    device_limits,
    dot_dtype,
    finish_softmax,
    load_rows,
    partial_buffers,
    score_factors,
    softmax_step,
    split_plan,
)
from hf_kvret_kernels.prompt_attention import choices


@triton.jit
def _visit_keys(  # type: ignore[no-untyped-def]
    acc,
    peak,
    total,
    q,
    q_index,
    key,
    value,
    valid,
    stride_k_t,
    stride_v_t,
    stride_valid_t,
    first,
    last,
    causal_offset,
    inner,
    outer,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    VALID: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Keys ``first .. last`` into the running softmax; unless MASKED, all rows see all of them."""
    key_columns = tl.arange(0, BLOCK_DK)
    value_columns = tl.arange(0, BLOCK_DV)
    for start in range(first, last, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        inside = tokens < last
        places = tokens.to(tl.int64)
        if VALID:
            inside = inside & (tl.load(valid + places * stride_valid_t, mask=inside, other=0) != 0)
        rows = places[:, None]
        k = load_rows(
            key + rows * stride_k_t + key_columns[None, :],
            inside,
            key_columns,
            DK,
            BLOCK_DK,
            MASKED,
        )
        v = load_rows(
            value + rows * stride_v_t + value_columns[None, :],
            inside,
            value_columns,
            DV,
            BLOCK_DV,
            MASKED,
        )
        dots = tl.dot(q.to(DOT_DTYPE), tl.trans(k).to(DOT_DTYPE), input_precision="ieee")
        scores = capped_scores(dots, inner, outer, SOFTCAP)
        if MASKED:
            score_mask = inside[None, :]
            if CAUSAL:
                score_mask = score_mask & (tokens[None, :] <= causal_offset + q_index[:, None])
            scores = tl.where(score_mask, scores, float("-inf"))
        weights, shrink, peak, total = softmax_step(scores, peak, total)
        weights = weights.to(DTYPE).to(DOT_DTYPE)
        acc = tl.dot(weights, v.to(DOT_DTYPE), acc * shrink[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit(do_not_specialize=["queries", "tokens", "causal_offset", "split_len"])
def _attend_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    valid,
    out,
    lse,
    stride_q_b,
    stride_q_h,
    stride_q_q,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_valid_b,
    stride_valid_t,
    heads,
    queries,
    tokens,
    causal_offset,
    split_len,
    inner,
    outer,
    G: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    VALID: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    # With causal attention the last rows have the most to do: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    split = tl.program_id(2)

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q_index = rows // G
    query_heads = h * G + rows % G
    real = q_index < queries
    key_columns = tl.arange(0, BLOCK_DK)
    value_columns = tl.arange(0, BLOCK_DV)
    q_rows = query + b * stride_q_b + query_heads * stride_q_h + q_index.to(tl.int64) * stride_q_q
    q = load_rows(q_rows[:, None] + key_columns[None, :], real, key_columns, DK, BLOCK_DK, True)

    first = split * split_len
    last = tl.minimum(first + split_len, tokens)
    all_see = last
    if CAUSAL:
        newest = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // G, queries - 1)
        last = tl.minimum(last, causal_offset + newest + 1)
        all_see = tl.minimum(last, causal_offset + (block * BLOCK_M) // G + 1)
    masked_from = first
    if not VALID:
        masked_from = first + tl.maximum(all_see - first, 0) // BLOCK_N * BLOCK_N

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    keys = key + b * stride_k_b + h * stride_k_h
    values = value + b * stride_v_b + h * stride_v_h
    validity = valid + b * stride_valid_b
    if not VALID:
        acc, peak, total = _visit_keys(
            acc, peak, total, q, q_index, keys, values, validity,
            stride_k_t, stride_v_t, stride_valid_t, first, masked_from, causal_offset, inner, outer,
            DK, DV, BLOCK_N, BLOCK_DK, BLOCK_DV, CAUSAL, VALID, SOFTCAP, False, DTYPE, DOT_DTYPE,
        )  # fmt: skip
    acc, peak, total = _visit_keys(
        acc, peak, total, q, q_index, keys, values, validity,
        stride_k_t, stride_v_t, stride_valid_t, masked_from, last, causal_offset, inner, outer,
        DK, DV, BLOCK_N, BLOCK_DK, BLOCK_DV, CAUSAL, VALID, SOFTCAP, True, DTYPE, DOT_DTYPE,
    )  # fmt: skip

    result, log_total = finish_softmax(acc, peak, total)
    target = (b * heads * G + query_heads) * queries + q_index
    target = target * tl.num_programs(2) + split
    tl.store(
        out + target[:, None] * DV + value_columns[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & (value_columns < DV)[None, :],
    )
    tl.store(lse + target, log_total, mask=real)


def rule_for(query: torch.Tensor, value: torch.Tensor) -> choices.PromptChoice:
    """How a call with these is launched where nothing was measured."""
    _, shared_bytes = device_limits(query.device)
    return choices.rule(*_tile_sizes(query, value), shared_bytes)


def _tile_sizes(query: torch.Tensor, value: torch.Tensor) -> tuple[int, int, int]:
    """Query rows of a KV head, columns of K plus V in a tile, bytes of a number."""
    rows = query.shape[2] * (query.shape[1] // value.shape[1])
    columns = sum(max(16, triton.next_power_of_2(x.shape[3])) for x in (query, value))
    return rows, columns, query.element_size()


def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal_offset: int | None,
    valid: torch.Tensor | None,
    softcap: float | None,
    out_dtype: torch.dtype,
    splits: int | None = None,
    choice: choices.PromptChoice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.prompt_attention.prompt_attention``.

    ``splits`` is the number of pieces the keys are cut into, None for as many as fill the device;
    ``choice`` how to launch, None for what was measured or the rule.
    """
    batch, query_heads, queries, key_dim = query.shape
    heads, tokens, value_dim = value.shape[1:]
    out = torch.empty(batch, query_heads, queries, value_dim, dtype=out_dtype, device=query.device)
    lse = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=query.device)
    if lse.numel() == 0:
        return out, lse
    rows, columns, itemsize = _tile_sizes(query, value)
    if choice is None:
        choice = rule_for(query, value)
        if rows <= choices.FEW_ROWS:
            size = choices.size_of(query, value, valid is not None)
            choice = tuning.choice(choices.CHOICES, size, choice, query.device)
    block_m = choices.tile_rows(rows, columns, itemsize)
    row_blocks = triton.cdiv(rows, block_m)
    splits, split_len = split_plan(
        tokens,
        choice.block_n,
        row_blocks * batch * heads,
        query.device,
        waves=choice.waves,
        most=choice.most_splits,
        least_len=choice.least_split_len,
        splits=splits,
    )
    part_out, part_lse = partial_buffers(out, lse, splits)
    inner, outer = score_factors(scale, softcap, LOG2_E)
    _attend_kernel[(row_blocks, batch * heads, splits)](
        query,
        key,
        value,
        mask_bytes(valid, query),
        part_out,
        part_lse,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *mask_strides(valid),
        heads,
        queries,
        tokens,
        0 if causal_offset is None else causal_offset,
        split_len,
        inner,
        outer,
        G=query_heads // heads,
        DK=key_dim,
        DV=value_dim,
        BLOCK_M=block_m,
        BLOCK_N=choice.block_n,
        BLOCK_DK=max(16, triton.next_power_of_2(key_dim)),
        BLOCK_DV=max(16, triton.next_power_of_2(value_dim)),
        CAUSAL=causal_offset is not None,
        VALID=valid is not None,
        SOFTCAP=softcap is not None,
        DTYPE=TL_DTYPES[query.dtype],
        DOT_DTYPE=dot_dtype(query.dtype),
        num_warps=choice.warps,
        num_stages=choice.stages,
        enable_fp_fusion=True,
    )
    if splits > 1:
        combine_splits(part_out, part_lse, out, lse)
    return out, lse
