"""Placement of cold rows by ``store="auto"``, by the memory that is free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from hf_kvret.options.config import RetrievalConfig, free_bytes
from hf_kvret.stores.free_memory import free_host_bytes
from hf_kvret_kernels.higgs.codec import LARGEST_GROUP

_log = logging.getLogger(__name__)

CODED = ("higgs", "higgs-host")
"""Names of stores whose rows only a store of these can load."""

PLAIN = MappingProxyType({"higgs": "device", "higgs-host": "host"})
"""By coded store, the one that keeps rows in full in the same memory."""

UNCODED = 16
"""Bits of an element that is not coded."""


@dataclass(frozen=True)
class Placement:
    """A store that ``"auto"`` may choose, if the rows fit.

    Attributes:
        store: its name.
        memory: what its memory is called in messages.
        free: ``device -> free bytes`` of that memory; None if unknown, and then rows fit.
        share: of the free bytes, how much rows may take: above 0, up to 1. The rest is for what a
            pass works with, and for the index where it lies in the same memory.
    """

    store: str
    memory: str
    free: Callable[[torch.device], int | None]
    share: float

    @property
    def is_coded(self) -> bool:
        """Whether rows are coded there, in ``bits`` bits an element."""
        return self.store in CODED


# Placements by type of device, the best first. The last one is taken even if rows don't fit.
PLACEMENTS: Mapping[str, tuple[Placement, ...]] = MappingProxyType(
    {
        "cuda": (
            Placement("device", "GPU memory", free_bytes, 0.25),
            Placement("host", "host memory", lambda device: free_host_bytes(), 0.8),
            Placement("higgs-host", "host memory", lambda device: free_host_bytes(), 0.8),
        ),
        "cpu": (
            Placement("device", "memory", lambda device: free_host_bytes(), 0.5),
            Placement("higgs", "memory", lambda device: free_host_bytes(), 0.5),
        ),
    }
)
_ELSEWHERE = (Placement("device", "device memory", free_bytes, 1.0),)


class Choice(NamedTuple):
    """The name of a store, and why it was chosen, for reports."""

    store: str
    reason: str


def choose(
    device: torch.device, rows_bytes: int, options: RetrievalConfig, head_dim: int
) -> Choice:
    """The first store where ``rows_bytes`` bytes of uncoded rows fit.

    Warns where rows will be coded, which changes answers a little, and where none has room.

    Args:
        device: of the queries.
        rows_bytes: of all layers, once all expected tokens are there.
        options: their ``bits`` are those of coded rows; 16: none are coded.
        head_dim: of the keys; codes need one that 8 divides.
    """
    can_code = options.bits != UNCODED and head_dim % 8 == 0
    placements = [
        placement
        for placement in PLACEMENTS.get(device.type, _ELSEWHERE)
        if options.takes_store(placement.store) and (not placement.is_coded or can_code)
    ]
    if not placements:
        raise ValueError(
            f"store='auto' knows no store on {device.type} that these options take: name one, as "
            "store='device'"
        )
    reasons = []
    for placement in placements:
        coded = placement.is_coded
        size = int(rows_bytes * _coded_share(options.bits, head_dim)) if coded else rows_bytes
        free = placement.free(device)
        fits = free is None or size <= free * placement.share
        reasons.append(_reason(placement, size, free, fits))
        if fits:
            break
    reason = "; ".join(reasons)
    if not fits:
        _log.warning(
            "store='auto' found too little memory and takes %r all the same: %s. The process may "
            "be killed: take a shorter prompt, a smaller batch, fewer max_new_tokens%s, or free "
            "memory",
            placement.store,
            reason,
            f", fewer bits (rows are coded in {options.bits}, which changes answers a little)"
            if coded
            else "",
        )
    elif coded:
        _log.warning(
            "store='auto' chose %r, rows in %d bits, which changes answers a little: %s. To keep "
            "them in the model's dtype free memory, or pass store=%r",
            placement.store,
            options.bits,
            reason,
            PLAIN[placement.store],
        )
    return Choice(placement.store, reason)


def coded_store(device: torch.device) -> str | None:
    """The coded store that ``choose`` may take on ``device``; None if there is none."""
    placements = PLACEMENTS.get(device.type, _ELSEWHERE)
    return next((each.store for each in placements if each.is_coded), None)


def _coded_share(bits: int, head_dim: int) -> float:
    """Bytes of codes and scales for one byte of rows of 16 bits; wider rows need less."""
    group = min(LARGEST_GROUP, head_dim & -head_dim)
    return bits / UNCODED + 1 / group


def _reason(placement: Placement, size: int, free: int | None, fits: bool) -> str:
    if free is None:
        return f"{placement.store}: how much {placement.memory} is free is unknown here"
    return (
        f"{placement.store}: {_text(size)} of rows {'fit' if fits else 'do not fit'} into "
        f"{placement.share:.0%} of {_text(free)} of free {placement.memory}"
    )


def _text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
