"""The end of a decode step's attention in Triton, in one launch.

A program attends to a chunk of the window, as ``prompt_attention`` cuts it, and merges into it its
share of the chunks of the other tokens: these loads are under way while it attends. The program
that is the last of a tile of queries to finish merges all programs' chunks. Who is last does not
change the order of the sums. No program waits for another one. A new token's row is written by the
programs of its chunk, before they attend to it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from hf_kvret_kernels import _dispatch as dispatch
from hf_kvret_kernels._triton_shared import (
    LN_2,
    add_sinks,
    empty_merge,
    finish_merge,
    finite_base,
    load_partials,
    log_total,
    mask_bytes,
    merge_all,
    merge_some,
)
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.merge import Partials
from hf_kvret_kernels.prompt_attention.triton import (
    TilePlan,
    attend_tile,
    query_indices,
    tile_constants,
    tile_numbers,
    tile_plan,
)
from hf_kvret_kernels.step_attention import NewToken
from hf_kvret_kernels.step_attention.triton_mean import (
    merge_mean,
    query_pointers,
    share_counts,
    share_products,
)

# Numbers of other chunks that a thread holds while it attends, and of its own at the end.
_OTHERS_OF_THREAD, _OWN_OF_THREAD = 32, 64
# Chunks of each query at once, at most.
_MOST_OTHERS, _MOST_OWN = 8, 16
# Other operations cut their tokens into so many chunks, at most.
_MOST_CHUNKS = 128
# Ids that a program counts at a time.
_IDS = 512


@triton.jit(
    do_not_specialize=[
        *("queries", "tokens", "causal_offset", "split_len"),
        *("other_splits", "share", "count", "per_query"),
    ]
)
def _finish_kernel(
    query, key, value, valid, other_outs, other_lses, outs, lses, tickets, sinks_ptr, ids_ptr,
    selected_ptr, out_ptr, lse_ptr, moments, mean_values, mean_counts, along, new_key, new_value,
    column, strides, heads, queries, tokens, causal_offset, split_len, inner, outer, other_splits,
    share, count, per_query,
    HAS_SINKS: tl.constexpr, MEAN: tl.constexpr, BY_GROUP: tl.constexpr, ROWS: tl.constexpr,
    OTHERS: tl.constexpr, OWN: tl.constexpr, IDS: tl.constexpr, NEW_SIDES: tl.constexpr,
    STRIDES: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MAIN: tl.constexpr, BLOCK_DK: tl.constexpr,
    REST: tl.constexpr, IN_KEY: tl.constexpr, BLOCK_DV: tl.constexpr, ONCE: tl.constexpr,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of query rows, ROWS of which are real, and a chunk of the keys and of the others."""
    block, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    rows, row_mask = query_indices(block, b, h, heads, queries, G, ROWS)
    columns = tl.arange(0, BLOCK_DV)

    program = (split * tl.num_programs(1) + pair) * tl.num_programs(0) + block
    indices = program * IDS + tl.arange(0, IDS)
    ids = tl.load(ids_ptr + indices, mask=indices < count, other=-1)
    first = split * share
    last = tl.minimum(first + share, other_splits)
    logs, means = load_partials(
        other_outs, other_lses, rows, row_mask, other_splits, first, last, DV, OTHERS, BLOCK_DV, ""
    )
    if NEW_SIDES:
        at = tl.load(column)
        if at // split_len == split:
            row = b * heads + h
            key_row = key + b * strides[3] + h * strides[4] + at * STRIDES[0]
            _copy_row(new_key + row * DK, key_row, 0, MAIN, BLOCK_DK)
            if REST:
                _copy_row(new_key + row * DK, key_row, MAIN, DK, REST)
            if NEW_SIDES == 2:
                value_row = value + b * strides[5] + h * strides[6] + at * STRIDES[1]
                _copy_row(new_value + row * DV, value_row, 0, DV, BLOCK_DV)
            # All threads of the program read what some have written.
            tl.debug_barrier()
    near, near_peak, near_mass = attend_tile(
        query, key, value, valid, strides, b, h, block, split, queries, tokens, causal_offset,
        split_len, inner, outer, STRIDES, G, DK, DV, BLOCK_M, BLOCK_N, MAIN, BLOCK_DK, REST,
        IN_KEY, BLOCK_DV,
        ONCE, CAUSAL, VALID, SOFTCAP, DTYPE, DOT_DTYPE,
    )  # fmt: skip
    peak, mass, total = empty_merge(ROWS, BLOCK_DV)
    peak, mass, total = merge_some(logs, means, peak, mass, total)
    mean, log = _union(
        near, near_peak * LN_2, near_mass, peak, mass, total, ROWS, BLOCK_M, BLOCK_DV
    )

    tile_rows, tile_mask = query_indices(block, b, h, heads, queries, G, BLOCK_M)
    targets = tile_rows * splits + split
    tl.store(
        outs + targets[:, None] * DV + columns[None, :],
        mean,
        mask=tile_mask[:, None] & (columns < DV)[None, :],
    )
    tl.store((lses + targets)[:, None], log, mask=tile_mask[:, None])
    if program * IDS < count:
        programs = splits * tl.num_programs(1) * tl.num_programs(0)
        _count(ids, ids_ptr, selected_ptr, (program + programs) * IDS, count, programs * IDS, IDS)
    OUTPUTS: tl.constexpr = 1 + DK + DV
    if MEAN:
        q_rows = query_pointers(query, strides, b, h, block, G, BLOCK_M)
        own_moments = moments + (b * heads + h) * (OUTPUTS * DK)
        share_products(
            q_rows, own_moments, along, tile_rows, tile_mask, split, splits, BLOCK_M, DK, OUTPUTS,
            MEAN,
        )  # fmt: skip
        share_counts(
            ids_ptr, along, rows, row_mask, b, h, block, split, splits, heads, queries, per_query,
            G, BY_GROUP, ROWS, OUTPUTS,
        )  # fmt: skip
    # All threads' stores come before the ticket, which the last program takes after all others.
    tl.debug_barrier()
    address = tickets + pair * tl.num_programs(0) + block
    ticket = tl.atomic_add(address, 1, sem="acq_rel", scope="gpu")
    if ticket == splits - 1:
        tl.store(address, 0)
        peak, mass, total = empty_merge(ROWS, BLOCK_DV)
        if MEAN:
            real_rows = query_pointers(query, strides, b, h, block, G, ROWS)
            peak, mass, total = merge_mean(
                real_rows, along, mean_values + pair * DV, mean_counts + b, rows, row_mask, splits,
                inner, outer, peak, mass, total, ROWS, DK, DV, OUTPUTS, MEAN, BLOCK_DV, SOFTCAP,
            )  # fmt: skip
        _merge_own(
            outs, lses, sinks_ptr, out_ptr, lse_ptr, rows, row_mask,
            h * G + (block * ROWS + tl.arange(0, ROWS)) % G,
            splits, peak, mass, total, HAS_SINKS, OWN, DV, BLOCK_DV,
        )  # fmt: skip


@triton.jit
def _copy_row(source, target, FIRST: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers ``FIRST .. END`` of a row, BLOCK at most."""
    columns = FIRST + tl.arange(0, BLOCK)
    tl.store(target + columns, tl.load(source + columns, mask=columns < END), mask=columns < END)


@triton.jit
def _union(
    near, near_peak, near_mass, peak, mass, total,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """``(mean [BLOCK_M, Dv], lse [BLOCK_M, 1])`` of two sets of tokens.

    ``near [BLOCK_M, Dv]`` and ``near_mass [BLOCK_M]`` are sums relative to ``near_peak``, a natural
    logarithm; the other three are a running merge of the first ROWS.
    """
    repeats: tl.constexpr = BLOCK_M // ROWS
    peak = tl.reshape(tl.broadcast_to(peak[None, :, :], (repeats, ROWS, 1)), (BLOCK_M, 1))
    mass = tl.reshape(tl.broadcast_to(mass[None, :, :], (repeats, ROWS, 1)), (BLOCK_M, 1))
    total = tl.reshape(
        tl.broadcast_to(total[None, :, :], (repeats, ROWS, BLOCK_DV)), (BLOCK_M, BLOCK_DV)
    )
    base = finite_base(tl.maximum(near_peak[:, None], peak))
    weight, shrink = tl.exp(near_peak[:, None] - base), tl.exp(peak - base)
    mass = near_mass[:, None] * weight + mass * shrink
    # At least 1 where there is a peak, and 0 without.
    factor = 1.0 / tl.maximum(mass, 1.0)
    return near * (weight * factor) + total * (shrink * factor), log_total(base, mass)


@triton.jit
def _merge_own(
    outs, lses, sinks_ptr, out_ptr, lse_ptr, rows, row_mask, query_heads, splits, peak, mass, total,
    HAS_SINKS: tl.constexpr, OWN: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """All programs' chunks of the queries at ``rows``, and learned sinks, into a running merge."""
    peak, mass, total = merge_all(
        outs, lses, rows, row_mask, splits, peak, mass, total, DV, OWN, BLOCK_DV, ".cg"
    )
    columns = tl.arange(0, BLOCK_DV)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + query_heads[:, None]).to(tl.float32)
        peak, mass, total = add_sinks(sink, peak, mass, total)
    mean, log = finish_merge(peak, mass, total)
    tl.store(
        out_ptr + rows[:, None] * DV + columns[None, :],
        mean.to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (columns < DV)[None, :],
    )
    tl.store(lse_ptr + rows[:, None], log, mask=row_mask[:, None])


@triton.jit
def _count(ids, ids_ptr, selected_ptr, first, count, step, IDS: tl.constexpr):
    """How many of ``ids [IDS]``, and of blocks from ``first`` on, are not -1, added to a total."""
    found = (ids >= 0).to(tl.int32)
    for start in range(first, count, step):
        indices = start + tl.arange(0, IDS)
        more = tl.load(ids_ptr + indices, mask=indices < count, other=-1)
        found += (more >= 0).to(tl.int32)
    tl.atomic_add(selected_ptr, tl.sum(found, axis=0).to(tl.int64), sem="relaxed")


def step_attention(
    call: dispatch.DenseCall,
    others: Partials,
    sink_logits: torch.Tensor | None,
    ids: torch.Tensor | None,
    selected: torch.Tensor | None,
    out_dtype: torch.dtype,
    new: NewToken | None = None,
    mean: MeanToken | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.step_attention.step_attention``.

    ``splits`` is the number of chunks the keys are cut into, None for as many as fill the device.
    """
    query, key, value, valid = call.query, call.key, call.value, call.valid
    shape, device, value_dim = query.shape[:3], query.device, value.shape[3]
    out = torch.empty(*shape, value_dim, dtype=out_dtype, device=device)
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    if lse.numel() == 0:
        return out, lse
    plan = tile_plan(query, value, splits)
    layout = _shared_out(plan, query, value, others.lses.shape[3])
    outs = torch.empty(*shape, layout.splits, value_dim, dtype=torch.float32, device=device)
    lses = torch.empty(*shape, layout.splits, dtype=torch.float32, device=device)
    tickets = others.tickets
    if tickets is None:
        tickets = torch.zeros(shape, dtype=torch.int32, device=device)
    # A kernel argument must be some pointer; without ids they are never read.
    flat = (tickets if ids is None else ids.reshape(-1)).contiguous()
    buffers = others.outs.contiguous(), others.lses.contiguous(), outs, lses, tickets
    results = (
        lse if sink_logits is None else sink_logits.contiguous(),
        flat,
        tickets if selected is None else selected,
        out,
        lse,
        *_mean_tensors(mean, query, layout.splits, unread=lse),
    )
    id_count = 0 if ids is None else flat.numel()
    # Values that lie in their keys are written with them. On meta all addresses are 0.
    in_key = value.data_ptr() == key.data_ptr() != 0

    def launch_of(
        layout: _Layout, valid: torch.Tensor | None, row: tuple[Any, ...] | None
    ) -> tuple[Any, dict[str, Any]]:
        """Arguments and constants of the kernel; ``row`` are a new token's tensors."""
        own = call._replace(valid=valid)
        numbers = tile_numbers(layout.plan, own)
        shares = layout.other_splits, layout.share, id_count, 0 if ids is None else ids.shape[-1]
        constants = {
            "HAS_SINKS": sink_logits is not None,
            # So many numbers of a key are read at once; 0 says that there is no mean.
            "MEAN": 0
            if mean is None
            else max(16, min(128, triton.next_power_of_2(call.query.shape[3]))),
            "BY_GROUP": ids is not None and ids.shape[1] < query.shape[1],
            "ROWS": layout.rows,
            "OTHERS": triton.next_power_of_2(layout.share),
            "OWN": layout.own,
            "IDS": _IDS,
            "NEW_SIDES": 0 if row is None else 1 if in_key else 2,
        }
        constants |= tile_constants(layout.plan, own)
        row = (query, query, query) if row is None else row
        given = query, key, value, mask_bytes(valid, query), *buffers, *results, *row
        return (*given, *numbers, *shares), constants

    row = None
    if new is not None:
        row = new.key.contiguous(), query if in_key else new.value.contiguous(), new.column
    now = dispatch.Window(value.shape[2], valid is not None, new is not None)
    for later, window in _layouts_to_come(query, value, layout, ids, now):
        # Without a mask some memory stands for one, whose rows begin at multiples of 16, too.
        mask = query.new_empty(len(query), 16, dtype=torch.bool) if valid is None else valid
        later_mask = mask if window.masked else None
        later_row = (query, query, torch.int64) if window.appends else None
        dispatch.warm_up(_finish_kernel, *launch_of(later, later_mask, later_row))
    arguments, constants = launch_of(layout, valid, row)
    grid = layout.plan.row_blocks, value.shape[0] * value.shape[1], layout.splits
    _finish_kernel[grid](*arguments, **constants)
    return out, lse


def _mean_tensors(
    mean: MeanToken | None, query: torch.Tensor, splits: int, unread: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """From ``moments`` to ``along``, in which programs leave products and counts."""
    if mean is None:
        return (unread,) * 4
    width = mean.moments.shape[2] + splits
    along = torch.empty(*query.shape[:3], width, dtype=torch.float32, device=query.device)
    return mean.moments, mean.values, mean.counts, along


class _Layout(NamedTuple):
    """How a call is shared out.

    Attributes:
        plan: of tiles.
        rows: of a tile that are real.
        splits: programs of a tile of queries.
        other_splits, share: chunks of other tokens, and those of a program.
        own: own chunks that are merged at once.
    """

    plan: TilePlan
    rows: int
    splits: int
    other_splits: int
    share: int
    own: int


def _shared_out(
    plan: TilePlan, query: torch.Tensor, value: torch.Tensor, other_splits: int
) -> _Layout:
    """How the programs of a plan share the chunks of others."""
    group, block_dv = query.shape[1] // value.shape[1], triton.next_power_of_2(value.shape[3])
    rows = min(plan.rows, triton.next_power_of_2(query.shape[2] * group))
    columns_of_thread = rows * max(16, block_dv) // (32 * plan.choice.warps)
    at_once = max(1, min(_MOST_OTHERS, _OTHERS_OF_THREAD // max(1, columns_of_thread)))
    # Programs without keys take others only.
    splits = max(plan.splits, triton.cdiv(other_splits, at_once))
    own_at_once = min(_MOST_OWN, max(1, _OWN_OF_THREAD // max(1, columns_of_thread)))
    own = min(own_at_once, triton.next_power_of_2(splits))
    return _Layout(plan, rows, splits, other_splits, triton.cdiv(other_splits, splits), own)


def _layouts_to_come(
    query: torch.Tensor,
    value: torch.Tensor,
    now: _Layout,
    ids: torch.Tensor | None,
    window_now: dispatch.Window,
) -> Iterator[tuple[_Layout, dispatch.Window]]:
    """Layouts that are compiled each for itself, and a window of each.

    Only those that somebody asked for; ``now`` and ``window_now`` are the present ones.
    """
    growth = dispatch.growth()
    if growth is None:
        return
    grows = ids is not None and max(growth.counts, default=0) > ids.shape[-1]
    most = max(now.other_splits, _MOST_CHUNKS) if grows else now.other_splits
    known = set()
    for window in sorted({*growth.windows, window_now}):
        plan = tile_plan(query, value, tokens=window.tokens)
        for other_splits in range(now.other_splits, most + 1):
            later = _shared_out(plan, query, value, other_splits)
            once = plan.split_len <= plan.choice.block_n
            form = window[1:], plan.choice, once, triton.next_power_of_2(later.share), later.own
            if form not in known:
                known.add(form)
                yield later, window
