"""Pieces that the Triton attention kernels share: loads, online softmax, merging of splits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._dispatch import interpreted

LOG2_E = 1.4426950408889634
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def dot_dtype(dtype: torch.dtype) -> Any:
    """Triton dtype of the operands of ``tl.dot`` for tensors of ``dtype``.

    The tensors' own, but float32 for bfloat16 in the interpreter, whose bfloat16 dot is wrong.
    """
    return tl.float32 if dtype == torch.bfloat16 and interpreted() else TL_DTYPES[dtype]


def device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that one block may take."""
    if device.type != "cuda":
        return 1, 99 << 10
    properties = torch.cuda.get_device_properties(device)
    default = properties.shared_memory_per_block
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", default)
    return properties.multi_processor_count, shared_bytes


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """``(inner, outer)`` of ``base2_scores``, as kernel arguments."""
    if softcap is None:
        return scale * LOG2_E, 1.0
    return scale / softcap, softcap * LOG2_E


@triton.jit
def base2_scores(dots, inner, outer, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dot products to scores in units of log 2: scaled, and softly capped with SOFTCAP."""
    scores = dots * inner
    if SOFTCAP:
        # tanh(x) = 2 sigmoid(2x) - 1: saturates without overflow, needs no device library.
        scores = outer * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
    return scores


@triton.jit
def softmax_step(scores, peak, total):  # type: ignore[no-untyped-def]
    """One block ``scores [M, N]`` (base 2, -inf for none) into the running softmax.

    Returns the weights ``[M, N]`` relative to the new peak, the factor ``[M]`` by which everything
    summed so far shrinks, the new peak and the new total. A row that saw nothing keeps its peak
    of -inf and weights of 0.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit
def finish_softmax(acc, peak, total):  # type: ignore[no-untyped-def]
    """``(out, lse)`` from the running softmax; 0 and -inf where nothing was seen."""
    seen = total > 0.0
    safe = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (peak + tl.log2(safe)) * LN_2, float("-inf"))
    return acc / safe[:, None], lse


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    pointers,
    row_mask,
    columns,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """``[rows, BLOCK]`` from ``pointers``; 0 beyond WIDTH and, with MASK_ROWS, outside row_mask."""
    if WIDTH == BLOCK:
        if MASK_ROWS:
            tile = tl.load(pointers, mask=row_mask[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    else:
        mask = (columns < WIDTH)[None, :]
        if MASK_ROWS:
            mask = mask & row_mask[:, None]
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    part_out,
    part_lse,
    out,
    lse,
    DV: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_DV)
    parts = tl.load(part_lse + row * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
    peak = tl.max(parts, 0)
    weights = tl.exp(parts - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    safe = tl.where(total > 0.0, total, 1.0)
    tile = tl.load(
        part_out + (row * SPLITS + splits)[:, None] * DV + columns[None, :],
        mask=(splits < SPLITS)[:, None] & (columns < DV)[None, :],
        other=0.0,
    )
    mean = tl.sum(tile * weights[:, None], 0) / safe
    tl.store(out + row * DV + columns, mean.to(out.dtype.element_ty), mask=columns < DV)
    tl.store(lse + row, tl.where(total > 0.0, peak + tl.log(safe), float("-inf")))


def combine_splits(
    part_out: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge S partial results of the same queries into ``out`` and ``lse``, in place.

    Args:
        part_out: ``[..., S, Dv]`` fp32, contiguous; part_lse: ``[..., S]`` fp32, contiguous.
        out: ``[..., Dv]``, contiguous; lse: ``[...]`` fp32, contiguous. Both are overwritten.
    """
    splits, value_dim = part_out.shape[-2:]
    _combine_kernel[(lse.numel(),)](
        part_out,
        part_lse,
        out,
        lse,
        DV=value_dim,
        SPLITS=splits,
        BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_DV=triton.next_power_of_2(value_dim),
    )


def partial_buffers(
    out: torch.Tensor, lse: torch.Tensor, splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where kernels write: ``out`` and ``lse`` with an axis of splits, or themselves for one."""
    if splits == 1:
        return out, lse
    shape = (*lse.shape, splits)
    part_out = torch.empty(*shape, out.shape[-1], dtype=torch.float32, device=out.device)
    return part_out, torch.empty(shape, dtype=torch.float32, device=out.device)


@triton.jit
def walsh_hadamard(  # type: ignore[no-untyped-def]
    x, DIM: tl.constexpr, LOG_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Unscaled transform of the rows of ``x [BLOCK, DIM]`` by ``LOG_DIM`` butterflies."""
    for i in tl.static_range(LOG_DIM):
        pairs = tl.reshape(x, (BLOCK, DIM // (2 << i), 2, 1 << i))
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (BLOCK, DIM))
    return x
