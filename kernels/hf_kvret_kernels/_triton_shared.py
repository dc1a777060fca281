"""What Triton kernels of several operations share.

Loads of masks and rows, online softmax, log-sum-exps, merges of chunks, and how a walk is split.
Attention kernels take powers of 2 in their softmax, kernels that select natural exponents.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._dispatch import interpreted

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
    """``(splits, split_len)``: how many chunks a walk over ``length`` is cut into, and how long.

    Args:
        block: what a program takes at a time; ``split_len`` is a multiple of it.
        programs: how many walk if nothing is cut; may be 0.
        waves: programs per multiprocessor to aim at.
        most: chunks, at most.
        least_len: of a chunk that is worth its share of the merge; None for ``block``.
        splits: chunks to cut into, None for as many as fill the device; fewer come out where there
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
def capped_scores(dots, inner, outer, SOFTCAP: tl.constexpr):
    """Dot products to scores: scaled, and softly capped with SOFTCAP."""
    scores = dots * inner
    if SOFTCAP:
        # tanh(x) = 2 sigmoid(2x) - 1: saturates without overflow, needs no device library.
        scores = outer * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
    return scores


@triton.jit
def softmax_step(scores, peak, total):
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
def finish_softmax(acc, peak, total):
    """``(out, lse)`` from the running softmax; 0 and -inf where nothing was seen."""
    safe = tl.where(total > 0.0, total, 1.0)
    return acc * (1.0 / safe)[:, None], softmax_lse(peak, total)


@triton.jit
def softmax_lse(peak, total):
    """The natural log-sum-exp from the running softmax; -inf where nothing was seen."""
    nonzero = total > 0.0
    return tl.where(nonzero, (peak + tl.log2(tl.where(nonzero, total, 1.0))) * LN_2, float("-inf"))


@triton.jit
def load_rows(
    pointers, row_mask, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASK_ROWS: tl.constexpr
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
def products(
    left_rows, left_mask, right_rows, right_mask,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """``[M, N]`` fp32 of rows of D contiguous numbers at ``left_rows [M]`` and ``right_rows [N]``.

    0 for rows outside the masks. Tensor cores multiply fp32 in three parts, as good as fp32.
    """
    dots = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, D, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)
        inside = (columns < D)[None, :]
        left = tl.load(
            left_rows[:, None] + columns[None, :], mask=left_mask[:, None] & inside, other=0.0
        )
        right = tl.load(
            right_rows[:, None] + columns[None, :], mask=right_mask[:, None] & inside, other=0.0
        )
        dots = tl.dot(
            left.to(DOT_DTYPE), tl.trans(right).to(DOT_DTYPE), dots, input_precision="tf32x3"
        )
    return dots


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


def partial_buffers(
    query: torch.Tensor, splits: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The uninitialised tensors of ``merge.Partials``, whose tickets a kernel has to make zeros."""
    shape, device = query.shape[:3], query.device
    return (
        torch.empty(*shape, splits, value_dim, dtype=torch.float32, device=device),
        torch.empty(*shape, splits, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


@triton.jit
def walsh_hadamard(x, DIM: tl.constexpr, LOG_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Unscaled transform of the rows of ``x [BLOCK, DIM]`` by ``LOG_DIM`` butterflies."""
    for i in tl.static_range(LOG_DIM):
        pairs = tl.reshape(x, (BLOCK, DIM // (2 << i), 2, 1 << i))
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (BLOCK, DIM))
    return x


# Bytes that a load takes at once where rows begin at multiples of them.
_UNIT = 16


def mask_bytes(valid: torch.Tensor | None, unread: torch.Tensor) -> torch.Tensor:
    """The mask as bytes; where there is none ``unread``, since an argument must be some pointer."""
    return unread if valid is None else valid.view(torch.uint8)


def mask_strides(valid: torch.Tensor | None) -> tuple[int, int]:
    """Strides of rows of the batch and of tokens; zeros where there is no mask."""
    return (0, 0) if valid is None else (valid.stride(0), valid.stride(1))


def mask_layout(valid: torch.Tensor | None) -> tuple[int, int, int]:
    """Stride of the batch's rows in units, stride of tokens, and the bytes of a unit.

    Rows begin at multiples of a unit and can be read to the end of their last one, though it may
    lie behind the mask: told to the compiler, this makes wide loads.
    """
    if valid is None:
        return 0, 0, 1
    row = valid.stride(0) if len(valid) > 1 else 0
    units = -(-valid.shape[1] // _UNIT)
    end = valid.storage_offset() + row * (len(valid) - 1) + units * _UNIT
    whole = valid.stride(1) == 1 and row % _UNIT == 0 and end <= valid.untyped_storage().nbytes()
    unit = _UNIT if whole else 1
    return row // unit, valid.stride(1), unit


@triton.jit
def load_mask(mask_ptr, b, tokens, length, stride_b, stride_n, UNIT: tl.constexpr):
    """Which of ``tokens [N]`` of row ``b``, an int64, are valid; none from ``length`` on.

    The strides and UNIT are those of ``mask_layout``.
    """
    mask_ptr += b * stride_b * UNIT + tokens.to(tl.int64) * stride_n
    readable = tokens < tl.cdiv(length, UNIT) * UNIT
    return (tl.load(mask_ptr, mask=readable, other=0) != 0) & (tokens < length)


@triton.jit
def finite_base(peak):
    """What to take off scores before ``exp``: their ``peak``, 0 where it is -inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def log_total(base, total):
    """The log-sum-exp from a sum of ``exp(score - base)``; -inf for a sum of none."""
    some = total > 0.0
    return tl.where(some, base + tl.log(tl.where(some, total, 1.0)), float("-inf"))


@triton.jit
def log_sum_exp(scores):
    """The log-sum-exp of ``scores [N]``; -inf where all are."""
    base = finite_base(tl.max(scores, axis=0))
    return log_total(base, tl.sum(tl.exp(scores - base), axis=0))


@triton.jit
def add_logs(first, second):
    """The log-sum-exps of both; -inf where both are."""
    base = finite_base(tl.maximum(first, second))
    return log_total(base, tl.exp(first - base) + tl.exp(second - base))


@triton.jit
def best_share(best, scores, lse):
    """The larger of ``best`` and the log-shares that a head with log-sum-exp ``lse`` gives.

    ``-inf`` stays so, also where a head's ``lse`` is.
    """
    return tl.maximum(best, scores - finite_base(lse))


@triton.jit
def sum_up(sums_ptr, chunks, CHUNKS: tl.constexpr, CACHE: tl.constexpr = ""):
    """The log-sum-exp of ``chunks`` log-sum-exps, CHUNKS at a time; CACHE modifies the loads."""
    if CHUNKS == 1:
        # There is but one.
        return tl.load(sums_ptr)
    peaks = tl.full((CHUNKS,), float("-inf"), tl.float32)
    totals = tl.zeros((CHUNKS,), tl.float32)
    for start in range(0, chunks, CHUNKS):
        indices = start + tl.arange(0, CHUNKS)
        part = tl.load(
            sums_ptr + indices, mask=indices < chunks, other=float("-inf"), cache_modifier=CACHE
        )
        peak = tl.maximum(peaks, part)
        base = finite_base(peak)
        totals = totals * tl.exp(peaks - base) + tl.exp(part - base)
        peaks = peak
    base = finite_base(tl.max(peaks, axis=0))
    return log_total(base, tl.sum(totals * tl.exp(peaks - base), axis=0))


# Arguments that follow the number of tokens held, or of ids: not to be specialized, since a compile
# for each class of them would come at some later flush.
CHANGING_STRIDES = ("stride_ids_b", "stride_ids_h", "stride_ids_q", "stride_table_b")


def selection_numbers(ids: torch.Tensor, rows: Any) -> tuple[int, ...]:
    """What kernels of chosen ``PagedRows`` take from ``stride_ids_b`` to ``tokens``."""
    _, *sizes = ids.shape
    return *ids.stride(), *rows.table.stride(), *sizes, rows.token_count


@triton.jit
def selection_index(index, heads, queries):
    """``(batch row, selecting head, query)`` of selection ``index`` of ``[B, H, Q]``."""
    return index // (queries * heads), (index // queries) % heads, index % queries


@triton.jit
def head_tile(index, heads, queries, TILE: tl.constexpr, TILES: tl.constexpr):
    """``(batch row, selecting head, query, indices [TILE] in its group)`` of a program.

    Programs are ``[B, H, TILES, Q]``; the last tile may reach beyond the group.
    """
    b, part, q = selection_index(index, heads * TILES, queries)
    return b, part // TILES, q, (part % TILES).to(tl.int32) * TILE + tl.arange(0, TILE)


@triton.jit
def load_ids(ids_row, indices, inside, stride, tokens):
    """Ids ``[K]`` at ``indices [K]`` int32 of a row whose ids are ``stride`` apart, and a mask.

    The mask is False outside ``inside``, for -1, and for what is none of the ``tokens``: such ids
    are never to be followed. They come as uint32: one comparison then finds both ends.
    """
    ids = tl.load(ids_row + indices.to(tl.int64) * stride, mask=inside, other=-1)
    ids = ids.to(tl.uint32, bitcast=True)
    return ids, ids < tokens.to(tl.uint32)


@triton.jit
def row_pointers(
    ids, id_mask, kv_head, table_row, page_address,
    stride_table,
    PAGE_LEN: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Pointers ``[K, 1]`` to the rows that ``ids [K]`` name; meaningless outside ``id_mask``.

    Args:
        ids, id_mask: of ``load_ids``.
        kv_head: int64.
        table_row: the page numbers of the batch row, ``stride_table`` apart.
        page_address: byte addresses, int64, of all pages ``[Hkv, PAGE_LEN, WIDTH]`` of DTYPE.
        ALIGN: see ``PagedRows.alignment_bytes``.
    """
    columns = (ids // PAGE_LEN).to(tl.int64)
    page = tl.load(table_row + columns * stride_table, mask=id_mask, other=0)
    address = tl.load(page_address + page, mask=id_mask, other=0)
    slot = kv_head * PAGE_LEN + ids % PAGE_LEN
    rows = address.to(tl.pointer_type(DTYPE)) + slot.to(tl.int64) * WIDTH
    return tl.multiple_of(rows[:, None], (ALIGN, ALIGN))


@triton.jit
def side_pointers(
    ids, id_mask, kv_head, table_row, page_address,
    stride_table,
    PAGE_LEN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEY_ALIGN: tl.constexpr,
    VALUE_ALIGN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``row_pointers`` of rows whose sides lie apart: ``[K, 1]`` to keys, ``[K, 1]`` to values.

    KEY_ALIGN and VALUE_ALIGN are ``PagedRows.side_alignments``.
    """
    columns = (ids // PAGE_LEN).to(tl.int64)
    page = tl.load(table_row + columns * stride_table, mask=id_mask, other=0)
    address = tl.load(page_address + page, mask=id_mask, other=0)
    block = address.to(tl.pointer_type(DTYPE)) + kv_head * (PAGE_LEN * (DK + DV))
    slot = ids % PAGE_LEN
    keys, values = block + slot * DK, block + (PAGE_LEN * DK + slot * DV)
    keys = tl.multiple_of(keys[:, None], (KEY_ALIGN, KEY_ALIGN))
    return keys, tl.multiple_of(values[:, None], (VALUE_ALIGN, VALUE_ALIGN))


@triton.jit
def load_partials(
    outs, lses, rows, row_mask, splits, first, last,
    DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """``(logs [S, R, 1], means [S, R, Dv])`` of chunks ``first .. last``, at most BLOCK_S of them.

    Args:
        outs, lses: pointers to ``[rows, splits, DV]`` and ``[rows, splits]``.
        rows: ``[R]`` int64; where ``row_mask [R]`` is false, a query has no chunks.
        CACHE: modifier of the loads, ``".cg"`` for what other programs of the launch wrote.
    """
    chunks = tl.arange(0, BLOCK_S)[:, None, None]
    columns = tl.arange(0, BLOCK_DV)[None, None, :]
    chunk_mask = (chunks < last - first) & row_mask[None, :, None]
    # The difference between the chunks of a query is known when this is compiled.
    starts = (rows * splits + first)[None, :, None]
    logs = tl.load(
        lses + starts + chunks, mask=chunk_mask, other=float("-inf"), cache_modifier=CACHE
    )
    means = tl.load(
        outs + starts * DV + chunks * DV + columns,
        mask=chunk_mask & (columns < DV),
        other=0.0,
        cache_modifier=CACHE,
    )
    return logs, means


@triton.jit
def empty_merge(ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """A running merge at first: ``(peak [R, 1], mass [R, 1], total [R, Dv])``."""
    peak = tl.full([ROWS, 1], float("-inf"), tl.float32)
    return peak, tl.zeros([ROWS, 1], tl.float32), tl.zeros([ROWS, BLOCK_DV], tl.float32)


@triton.jit
def merge_some(logs, means, peak, mass, total):
    """Chunks ``logs [S, R, 1]`` and ``means [S, R, Dv]`` into a running merge.

    ``total`` and ``mass`` are sums relative to ``peak``. Weights are relative to the largest: large
    logits would lose digits in a difference to the sum.
    """
    new_peak = tl.maximum(peak, tl.max(logs, 0))
    base = finite_base(new_peak)
    weights = tl.exp(logs - base[None, :, :])
    shrink = tl.exp(peak - base)
    total = total * shrink + tl.sum(weights * means.to(tl.float32), 0)
    return new_peak, mass * shrink + tl.sum(weights, 0), total


@triton.jit
def merge_all(
    outs, lses, rows, row_mask, splits, peak, mass, total,
    DV: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """All chunks of ``rows`` into a running merge; arguments as of ``load_partials``."""
    for first in range(0, splits, BLOCK_S):
        logs, means = load_partials(
            outs, lses, rows, row_mask, splits, first, splits, DV, BLOCK_S, BLOCK_DV, CACHE
        )
        peak, mass, total = merge_some(logs, means, peak, mass, total)
    return peak, mass, total


@triton.jit
def add_sinks(sink, peak, mass, total):
    """Tokens without values, whose logits are ``sink [R, 1]``, into a running merge."""
    new_peak = tl.maximum(peak, sink)
    base = finite_base(new_peak)
    shrink = tl.exp(peak - base)
    return new_peak, mass * shrink + tl.exp(sink - base), total * shrink


@triton.jit
def finish_merge(peak, mass, total):
    """``(mean [R, Dv], lse [R, 1])`` of a running merge; 0 and -inf where there was no token."""
    # At least 1 where there is a peak, and 0 without.
    return total * (1.0 / tl.maximum(mass, 1.0)), log_total(finite_base(peak), mass)


@triton.jit
def fill_empty(ids_ptr, first_empty, count, block, blocks, BLOCK: tl.constexpr):
    """Write -1 to elements ``first_empty .. count`` of a row of int32; each block writes a part."""
    nothing = tl.full((BLOCK,), -1, tl.int32)
    for start in range(first_empty + block * BLOCK, count, blocks * BLOCK):
        slots = start + tl.arange(0, BLOCK)
        tl.store(ids_ptr + slots, nothing, mask=slots < count)
