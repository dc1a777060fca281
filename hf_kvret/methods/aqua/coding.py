"""AQUA-KV's codecs: bits, group sizes, and how they are made."""

from __future__ import annotations

import torch

from hf_kvret_kernels import higgs

BACKBONES = ("higgs", "minmax", "absmax")
NOT_CODED = 16
"""Bits of uncoded rows."""
BITS = (2, 3, 4, NOT_CODED)
GROUPS = tuple(2**n for n in range(3, 11))
"""Numbers that may share a scale."""

# In the paper HIGGS shares a scale among up to 1024 elements, Quanto (absmax) among 64.
_LARGEST = {"higgs": 1024, "minmax": 64, "absmax": 64}
_SMALLEST = 8


def default_group(backbone: str, width: int) -> int:
    """Numbers that share a scale: the largest power of two that divides ``width``, at most 1024;
    64 for min-max and absmax.

    Args:
        backbone: one of ``BACKBONES``.
        width: KV heads times head dim.

    Raises:
        ValueError: no power of two from 8 on divides it.
    """
    group = min(_LARGEST[backbone], width & -width)
    if group < _SMALLEST:
        raise ValueError(
            f"a token's keys or values are {width} numbers: the codec's group is a power of two "
            f"from {_SMALLEST} on, and none divides that; this model can't be coded"
        )
    return group


def check_group(group: int, width: int) -> None:
    """ValueError unless groups of ``group`` numbers fill ``width``."""
    if width % group:
        raise ValueError(
            f"group={group} does not divide the {width} numbers of a token's keys or values: leave "
            "group out, or give a power of two that does"
        )


def make_codec(
    backbone: str, bits: int, group: int, seed: int, device: torch.device
) -> higgs.Codec | None:
    """The codec of rows; None for 16 bits."""
    if bits == NOT_CODED:
        return None
    if backbone == "higgs":
        return higgs.HiggsCodec(bits, group, seed=seed).to(device)
    codec = higgs.MinMaxCodec if backbone == "minmax" else higgs.AbsMaxCodec
    return codec(bits, group).to(device)
