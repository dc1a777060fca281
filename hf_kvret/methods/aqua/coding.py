"""AQUA-KV's codec: bits, group sizes, and how it is made."""

from __future__ import annotations

import torch

from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_kernels.higgs.codec import LARGEST_GROUP, SMALLEST_GROUP

NOT_CODED = 16
"""Bits of uncoded rows."""
BITS = (2, 3, 4, NOT_CODED)
GROUPS = tuple(2**n for n in range(3, 11))
"""Numbers that may share a scale."""


def default_group(width: int) -> int:
    """Numbers that share a scale: the largest power of two that divides ``width``, at most 1024.

    Args:
        width: KV heads times head dim.

    Raises:
        ValueError: no power of two from 8 on divides it.
    """
    group = min(LARGEST_GROUP, width & -width)
    if group < SMALLEST_GROUP:
        raise ValueError(
            f"a token's keys or values are {width} numbers: the codec's group is a power of two "
            f"from {SMALLEST_GROUP} on, and none divides that; this model can't be coded"
        )
    return group


def check_group(group: int, width: int) -> None:
    """ValueError unless groups of ``group`` numbers fill ``width``."""
    if width % group:
        raise ValueError(
            f"group={group} does not divide the {width} numbers of a token's keys or values: leave "
            "group out, or give a power of two that does"
        )


def make_codec(bits: int, group: int, seed: int, device: torch.device) -> HiggsCodec | None:
    """The codec of rows; None for 16 bits."""
    return None if bits == NOT_CODED else HiggsCodec(bits, group, seed=seed).to(device)
