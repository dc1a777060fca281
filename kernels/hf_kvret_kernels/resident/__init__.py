"""Slots for rows in use: which token lies in which slot, and who makes room for a token to come.

The bookkeeping of a hit/miss buffer (LRQK, section 4.1), without a k x k comparison and without
the host: a table leads from a token to its slot, so one look-up tells a hit from a miss.

Dimensions: B batch, H kv heads, n tokens, S slots, R requests, W = Dk + Dv.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvret_kernels._dispatch import check_tensor, run
from hf_kvret_kernels.paged import PagedRows

__all__ = ["SlotMap", "assign", "fetch"]


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Which token each slot holds. All on one device, int32, changed in place by ``assign``.

    Attributes:
        table: ``[B, H, n]`` slot of every token, -1 for none; last dimension contiguous.
        token: ``[B, H, S]`` token of every slot, -1 for none.
        stamp: ``[B, H, S]`` ``clock`` when the slot was last asked for, -1 for never.
        clock: ``[1]``, counts calls of ``assign``.
        counts: ``[3]`` int64, to which ``assign`` adds the requests that have a slot, and those
            whose rows are to be fetched; then a ticket, which is 0 before and afterwards. None:
            nobody counts.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """

    table: torch.Tensor
    token: torch.Tensor
    stamp: torch.Tensor
    clock: torch.Tensor
    counts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.table.ndim != 3 or self.token.ndim != 3:
            raise ValueError(
                f"table has shape {tuple(self.table.shape)}, token {tuple(self.token.shape)}: "
                "pass [B, H, n] and [B, H, S]"
            )
        lead = tuple(self.table.shape[:2])
        slots = (*lead, self.token.shape[-1])
        shapes = {"table": (*lead, self.table.shape[-1]), "token": slots, "stamp": slots}
        for name, shape in {**shapes, "clock": (1,)}.items():
            check_tensor(name, getattr(self, name), shape, (torch.int32,), self.table.device)
        if self.counts is not None:
            check_tensor("counts", self.counts, (3,), (torch.int64,), self.table.device)
        if self.table.stride(-1) != 1 and self.table.shape[-1] > 1:
            raise ValueError(
                f"table has strides {self.table.stride()}: its last dimension must be contiguous, "
                "pass table.contiguous()"
            )
        if not (self.token.is_contiguous() and self.stamp.is_contiguous()):
            raise ValueError(
                f"token has strides {self.token.stride()}, stamp {self.stamp.stride()}: both must "
                "be contiguous, pass .contiguous() of them"
            )

    @property
    def slots(self) -> int:
        """S."""
        return self.token.shape[-1]


def assign(
    slots: SlotMap, ids: torch.Tensor, *, tokens: int | None = None, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every requested token a slot; tokens that have one keep it.

    A token without one takes the slot that was asked for longest ago among those that this call
    doesn't ask for (least recently used); never-used slots come first, of equals the lower slot.
    So the set of slots that are taken is certain, but backends differ in which token gets which of
    them, and in which of several requests for a token fetches it. ``clock`` goes up by one.

    Args:
        slots: changed in place.
        ids: ``[B, H, R]`` int32 tokens, -1 for none; may repeat. R at most S, so that there is
            always a slot to take.
        tokens: ids are below it, at most n; None: n.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Returns:
        ``indices [B, H, R]`` int32, the slot of each request, -1 for none; and
        ``fetched [B, H, R]`` int32, the slot that is to be filled with this request's row, -1
        where the row is there or another request for the same token fills it.

    Raises:
        ValueError: ids of another form, more requests than slots, or more tokens than n.
        WrongIdError: a ValueError, with ``"naive"``: an id of no token. Triton takes it for -1.
    """
    lead, device = slots.table.shape[:2], slots.table.device
    check_tensor("ids", ids, (*lead, None), (torch.int32,), device)
    if ids.shape[2] > slots.slots:
        raise ValueError(
            f"{ids.shape[2]} requests for {slots.slots} slots: ask for fewer at a time, or make "
            "more slots"
        )
    if ids.is_meta:
        # Nobody knows here which slots are free: the result has the shape alone.
        return torch.empty_like(ids), torch.empty_like(ids)
    room = slots.table.shape[2]
    tokens = room if tokens is None else tokens
    if not 0 <= tokens <= room:
        raise ValueError(f"tokens={tokens}: the table is of 0 to {room} of them")
    return run(__name__, "assign", backend, slots, ids, tokens, on=ids)


def fetch(
    rows: PagedRows,
    ids: torch.Tensor,
    fetched: torch.Tensor,
    buffer: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Copy the rows of missing tokens into their slots, in place.

    Args:
        rows: all rows, a key and its value side by side. ``"naive"`` needs them on the table's
            device; ``"triton"`` also reads pinned host memory, over the bus.
        ids: ``[B, H, R]`` int32 tokens, as given to ``assign``; H are the rows' kv heads. Triton
            copies nothing for one that is none of the rows'.
        fetched: ``[B, H, R]`` int32, what ``assign`` returned; only these rows are read.
        buffer: ``[B, H, S, W]`` of the rows' dtype on the device of ids, contiguous: the slots.
            Other slots stay as they are.
        backend: ``"auto"``, ``"naive"`` or ``"triton"``.

    Raises:
        ValueError: tensors that do not fit, or rows that the backend cannot read.
        WrongIdError: a ValueError, with ``"naive"``: an id of no token, or a slot of none.
    """
    if rows.apart:
        raise ValueError("rows have apart=True: a slot has a key and its value side by side")
    lead = (rows.table.shape[0], rows.heads)
    device = rows.table.device
    check_tensor("ids", ids, (*lead, None), (torch.int32,), device)
    check_tensor("fetched", fetched, ids.shape, (torch.int32,), device)
    check_tensor("buffer", buffer, (*lead, None, rows.width), (rows.dtype,), device)
    if not buffer.is_contiguous():
        raise ValueError(
            f"buffer has strides {buffer.stride()}: pass a contiguous one, .contiguous() of it"
        )
    if ids.is_meta:
        return
    run(__name__, "fetch", backend, rows, ids, fetched, buffer, on=ids)
