"""AQUA-KV's codecs: group sizes, coding of residuals, and error statistics."""

from __future__ import annotations

import math

import torch

from hf_kvret_kernels import higgs

BACKBONES = ("higgs", "minmax")
NOT_CODED = 16
"""Bits of uncoded rows."""
BITS = (2, 3, 4, NOT_CODED)
GROUPS = tuple(2**n for n in range(3, 11))
"""Numbers that may share a scale."""

# The paper's: HIGGS shares a scale among up to 1024 numbers, Quanto among 64.
_LARGEST = {"higgs": 1024, "minmax": 64}
_SMALLEST = 8


def default_group(backbone: str, width: int) -> int:
    """Numbers that share a scale: the largest power of two that divides ``width``, at most 1024;
    64 for min-max.

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
    codec = (
        higgs.HiggsCodec(bits, group, seed=seed)
        if backbone == "higgs"
        else higgs.MinMaxCodec(bits, group)
    )
    return codec.to(device)


def recode(x: torch.Tensor, codec: higgs.Codec | None) -> torch.Tensor:
    """Rows ``[n, W]`` encoded and decoded again, fp32; ``x`` itself without a codec."""
    if codec is None:
        return x
    pair = codec.encode(x)
    return codec.decode(pair.codes, pair.scales, torch.float32)


class Tally:
    """Sums and squares of rows by name, for shares of variance; fp64."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """Add rows ``[n, W]``."""
        x = x.double()
        count, total, squares = self._sums.get(name, (0, 0.0, 0.0))
        sums = total + x.sum(0), squares + x.square().sum(0)
        self._sums[name] = (count + len(x), *sums)

    def variance_share(self, name: str, of: str) -> float | None:
        """The variance of ``name`` over that of ``of``, each about the means of its own numbers."""
        return self._share(self._variance(name), of)

    def square_share(self, name: str, of: str) -> float | None:
        """The mean square of ``name``, its mean included, over the variance of ``of``."""
        if name not in self._sums:
            return None
        count, _, squares = self._sums[name]
        return self._share(float(squares.sum()) / count, of)

    def _share(self, part: float | None, of: str) -> float | None:
        """None if no rows were added, or if they don't vary."""
        whole = self._variance(of)
        if part is None or not whole:
            return None
        share = part / whole
        return share if math.isfinite(share) else None

    def _variance(self, name: str) -> float | None:
        if name not in self._sums:
            return None
        count, total, squares = self._sums[name]
        return float((squares / count - (total / count).square()).sum())
