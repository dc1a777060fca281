"""The best of some thousand candidates in one launch.

Each program chooses the best of a block of candidates. The last program of a row to arrive chooses
among those. Nothing waits for the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels import _ahead as ahead
from hf_kvret_kernels._triton_log_sums import best_share, sum_up
from hf_kvret_kernels.top_k.triton_order import NOTHING, choose, order_of

# Arguments that change with the number of tokens held.
_CHANGING = ("stride_b", "stride_h", "stride_q", "stride_g", "length", "pieces", "count")


class _Blocks(NamedTuple):
    """Sizes of a program.

    Attributes:
        block: candidates.
        last: the most that the last one chooses from.
        pieces: log-sum-exps that are added up at a time.
    """

    block: int
    last: int
    pieces: int
    warps: int


# Few sizes, since each of them is compiled. Small blocks fill a GPU, large ones leave few rivals.
_SIZES = (_Blocks(1024, 2048, 256, 4), _Blocks(4096, 4096, 1024, 8))


def fits(length: int, count: int) -> bool:
    """Whether one launch chooses ``count`` of ``length`` candidates."""
    return _blocks(length, count) is not None


def _blocks(length: int, count: int) -> _Blocks | None:
    for size in _SIZES:
        if count <= size.block and triton.cdiv(length, size.block) * count <= size.last:
            return size
    return None


def best_ids(
    scores: torch.Tensor,
    ids: torch.Tensor,
    count: int,
    sums: torch.Tensor | None,
    tickets: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``hf_kvret_kernels.relevance.best_ids``, where ``fits``; of equal ones the first.

    Args:
        sums: ``[B, H, Q, G, pieces]`` fp32, contiguous: log-sum-exps of pieces of the scores. None
            where G is 1.
        tickets: ``[B, H, Q]`` int32 of zeros, contiguous, and zeros again afterwards; None for new
            ones.
    """
    return _launch(scores, ids.contiguous(), count, sums, tickets)


def top_places(scores: torch.Tensor, count: int) -> torch.Tensor:
    """``[B, H, Q, count]`` int32 places of the highest of ``scores [B, H, Q, n]``, ascending.

    Where ``fits``; else as ``best_ids`` with the places themselves as ids.
    """
    return _launch(scores.unsqueeze(3), None, count, None, None)


def compile_ahead(
    scores: torch.Tensor,
    ids: torch.Tensor | None,
    sums: torch.Tensor | None,
    choices: Iterable[tuple[int, int]],
) -> None:
    """Compile what ``best_ids``, or without ids ``top_places``, launches for ``(length, count)``.

    ``scores [B, H, Q, G, n]`` and the others are those of the present choice.
    """
    made = torch.int32, torch.int32, torch.int32, torch.int32
    for size in {size for choice in choices if (size := _blocks(*choice)) is not None}:
        ahead.compile_ahead(
            _best_kernel,
            _arguments(scores, ids, sums, made, scores.shape[4], 1),
            _constants(scores, ids, size),
        )


def _launch(
    scores: torch.Tensor,
    ids: torch.Tensor | None,
    count: int,
    sums: torch.Tensor | None,
    tickets: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, queries, group, length = scores.shape
    size = _blocks(length, count)
    assert size is not None and (group == 1 or sums is not None), "see fits and best_ids"
    lead, device = (batch, heads, queries), scores.device
    out = torch.empty(*lead, count, dtype=torch.int32, device=device)
    if out.numel() == 0:
        return out
    blocks = triton.cdiv(length, size.block)
    # Of each block's best.
    orders = torch.empty(*lead, blocks, count, dtype=torch.int32, device=device)
    places = torch.empty_like(orders)
    if tickets is None:
        tickets = torch.zeros(lead, dtype=torch.int32, device=device)
    # The long axis first: a grid has 2**31 - 1 programs there, and 65,535 on the others.
    _best_kernel[(batch * heads * queries, blocks)](
        *_arguments(scores, ids, sums, (out, orders, places, tickets), length, count),
        **_constants(scores, ids, size),
    )
    return out


def _arguments(
    scores: torch.Tensor,
    ids: torch.Tensor | None,
    sums: torch.Tensor | None,
    made: Sequence[Any],
    length: int,
    count: int,
) -> tuple[Any, ...]:
    """Of the kernel; ``made`` are out, orders, places and tickets, or their dtypes."""
    return (
        scores,
        scores if sums is None else sums,
        scores if ids is None else ids,
        *made,
        *scores.stride(),
        *scores.shape[1:3],
        length,
        0 if sums is None else sums.shape[-1],
        count,
    )


def _constants(scores: torch.Tensor, ids: torch.Tensor | None, size: _Blocks) -> dict[str, Any]:
    return {
        "HAS_IDS": ids is not None,
        "G": scores.shape[3],
        "BLOCK": size.block,
        "LAST": size.last,
        "PIECES": size.pieces,
        "num_warps": size.warps,
        "enable_fp_fusion": True,
    }


@triton.jit(do_not_specialize=_CHANGING)
def _best_kernel(
    scores_ptr,
    sums_ptr,
    ids_ptr,
    out_ptr,
    orders_ptr,
    places_ptr,
    tickets_ptr,
    stride_b,
    stride_h,
    stride_q,
    stride_g,
    stride_n,
    heads,
    queries,
    length,
    pieces,
    count,
    HAS_IDS: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
    PIECES: tl.constexpr,
):
    """A block of the candidates of one selection, scored by G query heads."""
    row = tl.program_id(0).to(tl.int64)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < length
    scores_ptr += (row // queries // heads) * stride_b + (row // queries % heads) * stride_h
    scores_ptr += (row % queries) * stride_q + places.to(tl.int64) * stride_n
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for g in range(G):
        score = tl.load(scores_ptr, mask=inside, other=float("-inf"))
        scores_ptr += stride_g
        if G == 1:
            best = score
        else:
            lse = sum_up(sums_ptr + (row * G + g) * pieces, pieces, PIECES)
            best = best_share(best, score, lse)
    order = order_of(best)
    selection, slots, taken = choose(order, count)
    start = (row * blocks + block) * count
    tl.store(orders_ptr + start + slots, order, mask=selection)
    tl.store(places_ptr + start + slots, places, mask=selection)
    own = tl.arange(0, BLOCK)
    nothing = tl.full((BLOCK,), NOTHING, tl.int32)
    tl.store(orders_ptr + start + own, nothing, mask=(own >= taken) & (own < count))
    # All that the program has written is there for whoever takes a later ticket.
    tl.debug_barrier()
    if tl.atomic_add(tickets_ptr + row, 1, sem="acq_rel") == blocks - 1:
        tl.store(tickets_ptr + row, 0)
        start = row * blocks * count
        _choose_among(
            *(orders_ptr + start, places_ptr + start, ids_ptr + row * length),
            *(out_ptr + row * count, blocks * count, count, HAS_IDS, LAST),
        )


@triton.jit
def _choose_among(
    orders_ptr,
    places_ptr,
    ids_ptr,
    out_ptr,
    number,
    count,
    HAS_IDS: tl.constexpr,
    LAST: tl.constexpr,
):
    """The best of a row among the ``number`` that its blocks have chosen, LAST at most."""
    rivals = tl.arange(0, LAST)
    inside = rivals < number
    order = tl.load(orders_ptr + rivals, mask=inside, other=NOTHING, cache_modifier=".cg")
    selection, slots, taken = choose(order, count)
    result = tl.load(places_ptr + rivals, mask=selection, other=0, cache_modifier=".cg")
    if HAS_IDS:
        result = tl.load(ids_ptr + result, mask=selection, other=-1)
    tl.store(out_ptr + slots, result, mask=selection)
    empty = tl.full((LAST,), -1, tl.int32)
    tl.store(out_ptr + rivals, empty, mask=(rivals >= taken) & (rivals < count))
