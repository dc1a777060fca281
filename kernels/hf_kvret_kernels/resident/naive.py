"""The hit/miss bookkeeping in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_kvret_kernels.ids import check_id_range
from hf_kvret_kernels.paged import PagedRows

if TYPE_CHECKING:
    from hf_kvret_kernels.resident import SlotMap


def assign(slots: SlotMap, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``hf_kvret_kernels.resident.assign``."""
    check_id_range(ids, tokens)
    table, token, stamp, clock = slots.table, slots.token, slots.stamp, slots.clock
    clock += 1
    b, h, r = (ids >= 0).nonzero(as_tuple=True)
    t = ids[b, h, r].long()
    slot = table[b, h, t]
    hit = slot >= 0
    stamp[b[hit], h[hit], slot[hit].long()] = clock

    bm, hm, rm, tm = b[~hit], h[~hit], r[~hit], t[~hit]
    # Where several requests name a token, the one whose claim is in the table fetches it.
    claim = -2 - rm.int()
    table[bm, hm, tm] = claim
    first = table[bm, hm, tm] == claim
    bm, hm, rm, tm = bm[first], hm[first], rm[first], tm[first]
    row = bm * ids.shape[1] + hm
    rank = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)
    victim = stamp.argsort(dim=-1, stable=True)[bm, hm, rank]
    old = token[bm, hm, victim].long()
    old_mask = old >= 0
    table[bm[old_mask], hm[old_mask], old[old_mask]] = -1
    table[bm, hm, tm] = victim.int()
    token[bm, hm, victim] = tm.int()
    stamp[bm, hm, victim] = clock

    indices, fetch_slots = torch.full_like(ids, -1), torch.full_like(ids, -1)
    indices[b, h, r] = table[b, h, t]
    fetch_slots[bm, hm, rm] = victim.int()
    if slots.counts is not None:
        slots.counts[0] += len(t)
        slots.counts[1] += len(tm)
    return indices, fetch_slots


def fetch(
    rows: PagedRows, ids: torch.Tensor, fetch_slots: torch.Tensor, buffer: torch.Tensor
) -> None:
    """See ``hf_kvret_kernels.resident.fetch``."""
    home = rows.chunks[0].device
    if home != ids.device:
        raise ValueError(
            f"the rows lie on {home}, ids on {ids.device}: use backend='triton' with pinned rows, "
            "or move the ids"
        )
    rows.check_range(ids.masked_fill(fetch_slots < 0, -1))
    check_id_range(fetch_slots, buffer.shape[2])
    b, h, r = (fetch_slots >= 0).nonzero(as_tuple=True)
    buffer[b, h, fetch_slots[b, h, r].long()] = rows.take(b, h, ids[b, h, r].long())
