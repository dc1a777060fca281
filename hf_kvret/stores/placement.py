"""Placement of cold rows by ``store="auto"``, by the memory that is free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from hf_kvret.options.config import RetrievalConfig
from hf_kvret.stores.free_memory import free_bytes, free_host_bytes

_log = logging.getLogger(__name__)

CODED = ("higgs", "higgs-host")
"""Names of stores whose rows only a store of these can load."""

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


# Placements by type of device, the best first. The last one is taken even if rows don't fit.
PLACEMENTS: Mapping[str, tuple[Placement, ...]] = MappingProxyType(
    {
        "cuda": (
            Placement("device", "GPU memory", free_bytes, 0.25),
            Placement("host", "host memory", lambda device: free_host_bytes(), 0.8),
        ),
        "cpu": (Placement("device", "memory", lambda device: free_host_bytes(), 0.5),),
    }
)
_ELSEWHERE = (Placement("device", "device memory", free_bytes, 1.0),)


class Choice(NamedTuple):
    """The name of a store, and why it was chosen, for reports."""

    store: str
    reason: str


def choose(device: torch.device, rows_bytes: int, options: RetrievalConfig) -> Choice:
    """The first store where ``rows_bytes`` bytes of rows fit, else the last one, with a warning.

    Args:
        device: of the queries.
        rows_bytes: of all layers, once all expected tokens are there.
        options: of the cache; they know which stores they take.
    """
    placements = [
        placement
        for placement in PLACEMENTS.get(device.type, _ELSEWHERE)
        if options.takes_store(placement.store)
    ]
    if not placements:
        raise ValueError(
            f"store='auto' knows no store on {device.type} that these options take: name one, as "
            "store='device'"
        )
    reasons = []
    for placement in placements:
        free = placement.free(device)
        fits = free is None or rows_bytes <= free * placement.share
        reasons.append(_reason(placement, rows_bytes, free, fits))
        if fits:
            break
    reason = "; ".join(reasons)
    if not fits:
        coded = "higgs" if device.type == "cpu" else "higgs-host"
        codes = f"pass store={coded!r} (rows in 2 to 4 bits, which change answers a little), "
        _log.warning(
            "store='auto' found too little memory and takes %r all the same: %s. The process may "
            "be killed: %stake a shorter prompt, a smaller batch, fewer max_new_tokens, or free "
            "memory",
            placement.store,
            reason,
            codes if options.takes_store(coded) else "",
        )
    return Choice(placement.store, reason)


def _reason(placement: Placement, size: int, free: int | None, fits: bool) -> str:
    if free is None:
        return f"{placement.store}: how much {placement.memory} is free is unknown here"
    return (
        f"{placement.store}: {_text(size)} of rows {'fit' if fits else 'do not fit'} into "
        f"{placement.share:.0%} of {_text(free)} of free {placement.memory}"
    )


def _text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
