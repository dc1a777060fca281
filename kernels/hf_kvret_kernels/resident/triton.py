"""The hit/miss bookkeeping and the copies in Triton.

``assign`` is one launch, a program for each row of slots, in steps separated by barriers: within a
program, and only there, a thread may read after a barrier what another wrote before it. Rows of
slots share nothing but the counts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from hf_kvret_kernels._triton_shared import TL_DTYPES, load_ids, row_pointers
from hf_kvret_kernels.paged import PagedRows

if TYPE_CHECKING:
    from hf_kvret_kernels.resident import SlotMap

_WARPS = 8
# Requests or slots that a program processes together: one to eight per thread.
_LEAST_BLOCK, _MOST_BLOCK = 32 * _WARPS, 2048
# Elements per program of the copy: several 16-byte loads in flight per thread.
_TILE = 4096
_MOST_ROWS = 64
_NEVER = tl.constexpr(2**31 - 1)


def assign(slots: SlotMap, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.resident.assign``."""
    batch, heads, count = ids.shape
    indices = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    fetch_slots = torch.empty_like(indices)
    if ids.numel() == 0:
        slots.clock.add_(1)
        return indices, fetch_slots
    victims, counts = torch.empty_like(indices), slots.counts
    if counts is None:
        counts = torch.zeros(3, dtype=torch.int64, device=ids.device)
    _assign_kernel[(batch * heads,)](
        ids,
        slots.table,
        slots.token,
        slots.stamp,
        slots.clock,
        counts,
        victims,
        indices,
        fetch_slots,
        *ids.stride(),
        *slots.table.stride()[:2],
        heads,
        count,
        tokens,
        slots.slots,
        BLOCK_R=_block(count),
        BLOCK_S=_block(slots.slots),
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )
    return indices, fetch_slots


def fetch(
    rows: PagedRows, ids: torch.Tensor, fetch_slots: torch.Tensor, buffer: torch.Tensor
) -> None:
    """See ``hf_kvret_kernels.resident.fetch``."""
    batch, heads, count = ids.shape
    if ids.numel() == 0:
        return
    block_w = triton.next_power_of_2(rows.width)
    block_r = max(1, min(_MOST_ROWS, _TILE // block_w))
    _fetch_kernel[(batch * heads, triton.cdiv(count, block_r))](
        ids,
        fetch_slots,
        rows.table,
        rows.addresses(),
        buffer,
        *ids.stride(),
        *fetch_slots.stride(),
        *rows.table.stride(),
        heads,
        count,
        rows.token_count,
        buffer.shape[2],
        PAGE_LEN=rows.page_len,
        WIDTH=rows.width,
        BLOCK_R=block_r,
        BLOCK_W=block_w,
        ALIGN=rows.alignment_bytes(),
        DTYPE=TL_DTYPES[rows.dtype],
        enable_fp_fusion=True,
    )


def _block(size: int) -> int:
    return max(_LEAST_BLOCK, min(_MOST_BLOCK, triton.next_power_of_2(size)))


@triton.jit(do_not_specialize=["heads", "count", "tokens", "slots"])
def _assign_kernel(
    ids_ptr, table_ptr, token_ptr, stamp_ptr, clock_ptr, counts_ptr, victims_ptr, places_ptr,
    fetched_ptr,
    stride_ids_b, stride_ids_h, stride_ids_r, stride_table_b, stride_table_h,
    heads, count, tokens, slots,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One row of slots."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // heads, row % heads
    ids_ptr += b * stride_ids_b + h * stride_ids_h
    table_ptr += b * stride_table_b + h * stride_table_h
    token_ptr += row * slots
    stamp_ptr += row * slots
    victims_ptr += row * count
    places_ptr += row * count
    fetched_ptr += row * count
    clock = tl.load(clock_ptr) + 1

    # Hits are stamped. Misses claim their token with values below -1, which means no slot; of
    # several requests for one token, any claim may win.
    for start in range(0, count, BLOCK_R):
        request = start + tl.arange(0, BLOCK_R)
        ids, id_mask = load_ids(ids_ptr, request, request < count, stride_ids_r, tokens)
        slot = tl.load(table_ptr + ids, mask=id_mask, other=-1)
        tl.store(stamp_ptr + slot, clock, mask=slot >= 0)
        tl.store(table_ptr + ids, -2 - request, mask=id_mask & (slot < 0))
    tl.debug_barrier()

    # Winning claims are numbered; ``fetched`` has the number until there is a slot.
    miss_count = tl.zeros((), dtype=tl.int32)
    for start in range(0, count, BLOCK_R):
        request = start + tl.arange(0, BLOCK_R)
        inside = request < count
        ids, id_mask = load_ids(ids_ptr, request, inside, stride_ids_r, tokens)
        claim = tl.load(table_ptr + ids, mask=id_mask, other=-1)
        winner = (claim == -2 - request).to(tl.int32)
        number = miss_count + tl.cumsum(winner, axis=0) - winner
        tl.store(fetched_ptr + request, tl.where(winner > 0, number, -1), mask=inside)
        miss_count += tl.sum(winner)
    if miss_count > 0:
        _write_victims(stamp_ptr, victims_ptr, clock, slots, miss_count, BLOCK_S)
    tl.debug_barrier()

    # Evicted tokens are not requested in this call, so their entries are not claims.
    for start in range(0, count, BLOCK_R):
        request = start + tl.arange(0, BLOCK_R)
        number = tl.load(fetched_ptr + request, mask=request < count, other=-1)
        winner = number >= 0
        ids, _ = load_ids(ids_ptr, request, winner, stride_ids_r, tokens)
        slot = tl.load(victims_ptr + number, mask=winner, other=-1)
        old = tl.load(token_ptr + slot, mask=winner, other=-1)
        # If threads have copies of a request, all must read it before one overwrites it.
        tl.debug_barrier()
        tl.store(table_ptr + old, -1, mask=old >= 0)
        tl.store(table_ptr + ids, slot, mask=winner)
        tl.store(token_ptr + slot, ids, mask=winner)
        tl.store(stamp_ptr + slot, clock, mask=winner)
        tl.store(fetched_ptr + request, slot, mask=winner)
    tl.debug_barrier()

    request_count = tl.zeros((), dtype=tl.int32)
    for start in range(0, count, BLOCK_R):
        request = start + tl.arange(0, BLOCK_R)
        inside = request < count
        ids, id_mask = load_ids(ids_ptr, request, inside, stride_ids_r, tokens)
        slot = tl.load(table_ptr + ids, mask=id_mask, other=-1)
        tl.store(places_ptr + request, slot, mask=inside)
        request_count += tl.sum((slot >= 0).to(tl.int32))
    tl.atomic_add(counts_ptr, request_count.to(tl.int64), sem="relaxed")
    tl.atomic_add(counts_ptr + 1, miss_count.to(tl.int64), sem="relaxed")
    # All programs have read the clock before the last one counts it up.
    if tl.atomic_add(counts_ptr + 2, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counts_ptr + 2, 0)
        tl.store(clock_ptr, clock)


@triton.jit
def _write_victims(stamp_ptr, victims_ptr, clock, slots, miss_count, BLOCK: tl.constexpr):
    """The ``miss_count`` slots with the lowest stamps, in the order of slots; of equals, the first.

    Slots of this call's hits have the stamp ``clock``. There are enough other slots, because there
    are at most as many requests as slots.
    """
    # The lowest stamp up to which there are enough slots, by halving -1 .. clock - 1.
    low = tl.full((), -1, tl.int32)
    high = clock - 1
    while low < high:
        middle = low + ((high - low) >> 1)
        enough = _count_up_to(stamp_ptr, middle, slots, BLOCK) >= miss_count
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    of_equal = miss_count - _count_up_to(stamp_ptr, high - 1, slots, BLOCK)

    taken_before = tl.zeros((), dtype=tl.int32)
    equal_before = tl.zeros((), dtype=tl.int32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        stamp = tl.load(stamp_ptr + slot, mask=slot < slots, other=_NEVER)
        equal = (stamp == high).to(tl.int32)
        equal_ahead = equal_before + tl.cumsum(equal, axis=0) - equal
        victim = (stamp < high) | ((equal > 0) & (equal_ahead < of_equal))
        number = taken_before + tl.cumsum(victim.to(tl.int32), axis=0) - victim.to(tl.int32)
        # Invalid stamps must not cause writes outside of the row.
        tl.store(victims_ptr + number, slot, mask=victim & (number < miss_count))
        equal_before += tl.sum(equal)
        taken_before += tl.sum(victim.to(tl.int32))


@triton.jit
def _count_up_to(stamp_ptr, limit, slots, BLOCK: tl.constexpr):
    """How many stamps are at most ``limit``."""
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        stamp = tl.load(stamp_ptr + slot, mask=slot < slots, other=_NEVER)
        counts += (stamp <= limit).to(tl.int32)
    return tl.sum(counts)


@triton.jit(do_not_specialize=["heads", "count", "tokens", "slots"])
def _fetch_kernel(
    ids_ptr, fetched_ptr, table, page_address, buffer,
    stride_ids_b, stride_ids_h, stride_ids_r, stride_fetched_b, stride_fetched_h, stride_fetched_r,
    stride_table_b, stride_table,
    heads, count, tokens, slots,
    PAGE_LEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
    ALIGN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A few requests of one row of slots; whole rows are copied."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // heads, row % heads
    request = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    fetched_row = fetched_ptr + b * stride_fetched_b + h * stride_fetched_h
    slot, slot_mask = load_ids(fetched_row, request, request < count, stride_fetched_r, slots)
    ids_row = ids_ptr + b * stride_ids_b + h * stride_ids_h
    ids, id_mask = load_ids(ids_row, request, slot_mask, stride_ids_r, tokens)
    table_row = table + b * stride_table_b
    sources = row_pointers(
        ids, id_mask, h, table_row, page_address, stride_table, PAGE_LEN, WIDTH, ALIGN, DTYPE
    )
    columns = tl.arange(0, BLOCK_W)
    mask = id_mask[:, None] & (columns < WIDTH)[None, :]
    tile = tl.load(sources + columns[None, :], mask=mask)
    targets = buffer + (row * slots + slot)[:, None] * WIDTH
    tl.store(targets + columns[None, :], tile, mask=mask)
