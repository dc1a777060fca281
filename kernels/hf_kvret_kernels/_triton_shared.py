"""What the Triton attention kernels share: loads, online softmax, how a walk is split."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._dispatch import interpreted
from hf_kvret_kernels._triton_log_sums import finite_base
from hf_kvret_kernels.merge import Pieces

LOG2_E = 1.4426950408889634
# Rows of more numbers are held in two parts, where that is less than padding them.
_WHOLE = 128
# Sums of values that a program of 4 warps has registers for.
_SUMS = 8192
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


def split_plan(
    length: int,
    block: int,
    programs: int,
    device: torch.device,
    *,
    waves: int,
    most: int,
    least_len: int | None = None,
    splits: int | None = None,
) -> tuple[int, int]:
    """``(splits, split_len)``: how many pieces a walk over ``length`` is cut into, and how long.

    Args:
        block: what a program takes at a time; ``split_len`` is a multiple of it.
        programs: how many walk if nothing is cut; may be 0.
        waves: programs per multiprocessor to aim at.
        most: pieces, at most.
        least_len: of a piece that is worth its share of the merge; None for ``block``.
        splits: pieces to cut into, None for as many as fill the device; fewer come out where there
            are not so many blocks.
    """
    if splits is None:
        processors, _ = device_limits(device)
        worth = triton.cdiv(length, least_len or block)
        splits = max(1, min(most, worth, waves * processors // max(1, programs)))
    split_len = max(1, triton.cdiv(triton.cdiv(length, block), splits)) * block
    return max(1, triton.cdiv(length, split_len)), split_len


def score_factors(scale: float, softcap: float | None, unit: float = 1.0) -> tuple[float, float]:
    """``(inner, outer)`` of ``capped_scores``, as kernel arguments.

    ``unit`` multiplies the scores in the end: LOG2_E for a softmax that takes powers of 2.
    """
    if softcap is None:
        return scale * unit, 1.0
    return scale / softcap, softcap * unit


@triton.jit
def capped_scores(dots, inner, outer, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dot products to scores: scaled, and softly capped with SOFTCAP."""
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
    base = finite_base(new_peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    return weights, shrink, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit
def finish_softmax(acc, peak, total):  # type: ignore[no-untyped-def]
    """``(out, lse)`` from the running softmax; 0 and -inf where nothing was seen."""
    safe = tl.where(total > 0.0, total, 1.0)
    return acc * (1.0 / safe)[:, None], softmax_lse(peak, total)


@triton.jit
def softmax_lse(peak, total):  # type: ignore[no-untyped-def]
    """The natural log-sum-exp from the running softmax; -inf where nothing was seen."""
    nonzero = total > 0.0
    return tl.where(nonzero, (peak + tl.log2(tl.where(nonzero, total, 1.0))) * LN_2, float("-inf"))


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


class Columns(NamedTuple):
    """How kernels hold rows of a number that is no power of two: in two parts.

    Attributes:
        main: numbers of the first part.
        block: what the first part is padded to, a power of two.
        rest: what the second part is padded to; 0 where there is none.
    """

    main: int
    block: int
    rest: int

    @classmethod
    def of(cls, dim: int) -> Self:
        """The parts of ``dim`` numbers; up to 128 are one, which is padded."""
        block = max(16, triton.next_power_of_2(dim))
        if dim <= _WHOLE or dim == block:
            return cls(dim, block, 0)
        return cls(block // 2, block // 2, max(16, triton.next_power_of_2(dim - block // 2)))


def tile_heads(group: int, value_dim: int) -> int:
    """Query heads of a group that a program takes: as many as have room for their sums."""
    return max(16, min(triton.next_power_of_2(group), _SUMS // triton.next_power_of_2(value_dim)))


def piece_buffers(
    batch: int, heads: int, queries: int, splits: int, value_dim: int, device: torch.device
) -> Pieces:
    """Where a kernel writes ``splits`` pieces, and zeros the tickets: uninitialised memory."""
    shape = batch, heads, queries
    return Pieces(
        torch.empty(*shape, splits, value_dim, dtype=torch.float32, device=device),
        torch.empty(*shape, splits, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


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
