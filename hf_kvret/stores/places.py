"""Where ``store="auto"`` puts cold rows, by the memory that is free."""

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
"""Bits of a number that is not coded."""


@dataclass(frozen=True)
class Place:
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
        """Whether rows are coded there, in ``bits`` bits a number."""
        return self.store in CODED


# By kind of device, best first. The last one is taken even if rows don't fit there.
PLACES: Mapping[str, tuple[Place, ...]] = MappingProxyType(
    {
        "cuda": (
            Place("device", "GPU memory", free_bytes, 0.25),
            Place("host", "host memory", lambda device: free_host_bytes(), 0.8),
            Place("higgs-host", "host memory", lambda device: free_host_bytes(), 0.8),
        ),
        "cpu": (
            Place("device", "memory", lambda device: free_host_bytes(), 0.5),
            Place("higgs", "memory", lambda device: free_host_bytes(), 0.5),
        ),
    }
)
_ELSEWHERE = (Place("device", "device memory", free_bytes, 1.0),)


class Choice(NamedTuple):
    """The name of a store, and why it was chosen, for reports."""

    store: str
    reason: str


def choose(
    device: torch.device, rows_bytes: int, options: RetrievalConfig, head_dim: int
) -> Choice:
    """The first place where ``rows_bytes`` bytes of uncoded rows fit.

    Warns where rows will be coded, which changes answers a little, and where none has room.

    Args:
        device: of the queries.
        rows_bytes: of all layers, at the end of what is expected.
        options: their ``bits`` are those of coded rows; 16: none are coded.
        head_dim: of the keys; codes need one that 8 divides.
    """
    places = [
        place
        for place in PLACES.get(device.type, _ELSEWHERE)
        if options.takes_store(place.store) and (not place.is_coded or _codes(options, head_dim))
    ]
    if not places:
        raise ValueError(
            f"store='auto' knows no store on {device.type} that these options take: name one, as "
            "store='device'"
        )
    reasons = []
    for place in places:
        coded = place.is_coded
        size = int(rows_bytes * _coded_share(options.bits, head_dim)) if coded else rows_bytes
        free = place.free(device)
        fits = free is None or size <= free * place.share
        reasons.append(_reason(place, size, free, fits))
        if fits:
            break
    reason = "; ".join(reasons)
    if not fits:
        _log.warning(
            "store='auto' found too little memory and takes %r all the same: %s. The process may "
            "be killed: take a shorter prompt, a smaller batch, fewer max_new_tokens%s, or free "
            "memory",
            place.store,
            reason,
            f", fewer bits (rows are coded in {options.bits}, which changes answers a little)"
            if coded
            else "",
        )
    elif coded:
        _log.warning(
            "store='auto' chose %r, rows in %d bits, which changes answers a little: %s. To keep "
            "them in the model's dtype free memory, or pass store=%r",
            place.store,
            options.bits,
            reason,
            PLAIN[place.store],
        )
    return Choice(place.store, reason)


def coded_store(device: torch.device) -> str | None:
    """The coded store that ``choose`` may take on ``device``; None if there is none."""
    places = PLACES.get(device.type, _ELSEWHERE)
    return next((place.store for place in places if place.is_coded), None)


def _codes(options: RetrievalConfig, head_dim: int) -> bool:
    """Whether rows of these heads can be, and may be, coded."""
    return options.bits != UNCODED and head_dim % 8 == 0


def _coded_share(bits: int, head_dim: int) -> float:
    """Bytes of codes and scales for one byte of rows of 16 bits a number; wider ones need less."""
    group = min(LARGEST_GROUP, head_dim & -head_dim)
    return bits / UNCODED + 1 / group


def _reason(place: Place, size: int, free: int | None, fits: bool) -> str:
    if free is None:
        return f"{place.store}: how much {place.memory} is free is unknown here"
    return (
        f"{place.store}: {_text(size)} of rows {'fit' if fits else 'do not fit'} into "
        f"{place.share:.0%} of {_text(free)} of free {place.memory}"
    )


def _text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
