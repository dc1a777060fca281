"""Triton kernels of relevance where there are many tokens: log-sum-exps of chunks, then shares."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import best_share, finite_base, log_sum_exp
from hf_kvret_kernels.top_k import triton as top_k

# Tokens of a program, and the most chunks that a row is cut into.
_TOKENS = 1024
_CHUNKS = 256
_CHANGING = ("length", "blocks", "chunks", "chunk_len", "queries", "stride")


def group_relevance(scores: torch.Tensor, heads: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.relevance.group_relevance``."""
    batch, query_heads, queries, length = scores.shape
    group = query_heads // heads
    best = scores.new_empty(batch, heads, queries, length)
    if best.numel() == 0:
        return best
    scores = scores.contiguous()
    write_best_shares(scores, _chunk_sums(scores), best, queries, group, _CHUNKS)
    return best


def best_ids(scores: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.relevance.best_ids``; of equal candidates the first are taken."""
    if scores.shape[3] == 1:
        return top_k.best_ids(scores, count, ids)
    scores = scores.contiguous()
    return top_k.best_ids(scores, count, ids, _chunk_sums(scores))


def top_indices(scores: torch.Tensor, heads: int, count: int) -> torch.Tensor:
    """See ``hf_kvret_kernels.relevance.top_indices``."""
    if scores.shape[1] == heads:
        return top_k.top_k(scores, count)
    scores = scores.contiguous()
    sums = _chunk_sums(scores)
    groups = [rows.unflatten(1, (heads, -1)).transpose(2, 3) for rows in (scores, sums)]
    top_k.warm_up(groups[0], count, sums=groups[1], at_once=False)
    return top_k.split_top_k(groups[0], count, sums=groups[1])


def count_ids(ids: torch.Tensor, total: torch.Tensor) -> None:
    """See ``hf_kvret_kernels.relevance.count_ids``."""
    flat = ids.reshape(-1)
    if flat.numel():
        grid = (triton.cdiv(flat.numel(), _TOKENS),)
        _count_kernel[grid](
            flat, total, flat.stride(0), flat.numel(), BLOCK=_TOKENS, enable_fp_fusion=True
        )


def _chunk_sums(scores: torch.Tensor) -> torch.Tensor:
    """``[..., chunks]``: log-sum-exps of chunks of contiguous ``scores [..., n]``."""
    length = scores.shape[-1]
    chunk_len = triton.cdiv(triton.cdiv(length, _TOKENS), _CHUNKS) * _TOKENS
    chunks = triton.cdiv(length, chunk_len)
    sums = scores.new_empty(*scores.shape[:-1], chunks)
    if sums.numel():
        _chunk_kernel[(sums.numel(),)](
            scores, sums, length, chunks, chunk_len, BLOCK=_TOKENS, enable_fp_fusion=True
        )
    return sums


def write_best_shares(
    scores: torch.Tensor,
    sums: torch.Tensor,
    best: torch.Tensor,
    queries: int,
    group: int,
    most: int,
    stride: int | None = None,
) -> None:
    """Relevance into ``best [..., n]``, from scores and log-sum-exps of chunks of their rows.

    Args:
        scores: ``[rows, n]`` fp32 in any shape, contiguous; a head's ``queries`` rows follow each
            other, and so do the ``group`` heads that select together.
        sums: ``[rows, chunks]`` fp32 in any shape, contiguous.
        most: the number of chunks rounded up, a power of two: a compile for each.
        stride: numbers from one row of scores to the next, if they are not n.
    """
    length = best.shape[-1]
    blocks, chunks = triton.cdiv(length, _TOKENS), sums.shape[-1]
    grid = (best.numel() // length * blocks,)
    layout = (length, blocks, chunks, queries, stride or length)
    _share_kernel[grid](
        scores, sums, best, *layout, G=group, BLOCK=_TOKENS, CHUNKS=most, enable_fp_fusion=True
    )


@triton.jit(do_not_specialize=_CHANGING)
def _chunk_kernel(scores_ptr, sums_ptr, length, chunks, chunk_len, BLOCK: tl.constexpr):
    """The log-sum-exp of a chunk of a row."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    first = (tl.program_id(0) % chunks) * chunk_len
    last = tl.minimum(first + chunk_len, length)
    scores_ptr += row * length
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + tokens, mask=tokens < last, other=float("-inf"))
        peak = tl.maximum(peaks, score)
        base = finite_base(peak)
        totals = totals * tl.exp(peaks - base) + tl.exp(score - base)
        peaks = peak
    # Each lane's sum is at least 1 where it has a peak.
    lse = log_sum_exp(peaks + tl.log(tl.maximum(totals, 1.0)))
    tl.store(sums_ptr + tl.program_id(0), lse)


@triton.jit(do_not_specialize=_CHANGING)
def _share_kernel(
    scores_ptr, sums_ptr, best_ptr, length, blocks, chunks, queries, stride,
    G: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The largest ``score - lse`` of G query heads, for a block of tokens and one query."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < length
    indices = tl.arange(0, CHUNKS)
    first = (row // queries) * G * queries + row % queries
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for g in range(G):
        source = first + g * queries
        sums_row = sums_ptr + source * chunks
        part = tl.load(sums_row + indices, mask=indices < chunks, other=float("-inf"))
        scores = tl.load(scores_ptr + source * stride + tokens, mask=inside, other=float("-inf"))
        best = best_share(best, scores, log_sum_exp(part))
    tl.store(best_ptr + row * length + tokens, best, mask=inside)


@triton.jit(do_not_specialize=["length"])
def _count_kernel(ids_ptr, total_ptr, stride, length, BLOCK: tl.constexpr):
    """How many of a block are not -1, added to the total."""
    indices = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + indices.to(tl.int64) * stride, mask=indices < length, other=-1)
    tl.atomic_add(total_ptr, tl.sum((ids >= 0).to(tl.int64), axis=0), sem="relaxed")
