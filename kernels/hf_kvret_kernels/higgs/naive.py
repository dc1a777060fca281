"""The codecs in plain torch, fp32 throughout.

Groups are the rows ``[n, group]`` of a matrix here; inputs were checked by the wrappers.
"""

from __future__ import annotations

import torch

from hf_kvret_kernels.higgs.tables import grid_merits, grid_points
from hf_kvret_kernels.paris.naive import hadamard

HALF_MAX = 65504.0
# Scores of pairs and grid points that ``nearest_points`` holds at once.
_MOST_SCORES = 1 << 20


def half_numbers(raw: torch.Tensor) -> torch.Tensor:
    """``[n, m]`` fp16 of their bytes ``raw [n, 2 * m]``, wherever these lie: no alignment."""
    low, high = raw.unflatten(-1, (-1, 2)).to(torch.int16).unbind(-1)
    return (low | (high << 8)).view(torch.float16)


def transform(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, its own inverse.

    With ``H_ab = H_a (x) H_b`` the rows become matrices ``[a, b]``, multiplied from both sides.
    """
    group = x.shape[-1]
    b = 1 << (group.bit_length() // 2)
    a = group // b
    matrices = x.unflatten(-1, (a, b))
    result = hadamard(a, x.device) @ matrices @ hadamard(b, x.device)
    return result.flatten(-2) * group**-0.5


def nearest_points(pairs: torch.Tensor, bits: int) -> torch.Tensor:
    """``[n]`` int64: the grid point nearest to each of ``pairs [n, 2]``; the first of equals."""
    merits = grid_merits(bits, pairs.device)
    pieces = pairs.split(max(1, _MOST_SCORES // len(merits)))
    parts = [torch.addmm(-merits[:, 2], piece, merits[:, :2].T).argmax(1) for piece in pieces]
    return torch.cat(parts)


def higgs_encode(
    groups: torch.Tensor, signs: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes [n, group / 2] int64, scales [n, 1] fp16)`` of ``groups [n, group]``.

    Pairs are divided by the scale as it is stored, so nothing is lost to its rounding.
    """
    x = groups.float()
    energy = x.square().sum(1, keepdim=True)
    finite = energy < float("inf")
    scales = (energy / x.shape[1]).sqrt().clamp_max(HALF_MAX).half()
    scales = scales.masked_fill(~finite, float("nan"))
    divisors = scales.float()
    x = transform(x * signs) * torch.where(divisors > 0, 1 / divisors, 0.0)
    pairs = x.masked_fill(~finite, 0.0).view(-1, 2)
    return nearest_points(pairs, bits).view(len(groups), groups.shape[1] // 2), scales


def higgs_decode(
    codes: torch.Tensor, scales: torch.Tensor, signs: torch.Tensor, bits: int
) -> torch.Tensor:
    """``[n, group]`` fp32 of ``codes [n, group / 2]`` and ``scales [n, 1]`` fp16."""
    points = grid_points(bits, codes.device)
    x = points.index_select(0, codes.flatten()).view(len(codes), len(signs))
    return transform(x * scales.float()) * signs


def minmax_encode(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(codes [n, group] int32, scales [n, 2] fp16)``, a step and a zero for each group.

    Codes count steps from the zero as it is stored, the smallest number rounded to fp16.
    """
    x = groups.float()
    finite = (x.abs() < float("inf")).all(1, keepdim=True)
    x = x.masked_fill(~finite, 0.0)
    most = (1 << bits) - 1
    zeros = x.amin(1, keepdim=True).clamp(-HALF_MAX, HALF_MAX).half()
    x = x - zeros.float()
    steps = (x.amax(1, keepdim=True) / most).clamp(0.0, HALF_MAX).half()
    divisors = steps.float()
    x = x * torch.where(divisors > 0, 1 / divisors, 0.0)
    codes = (x + 0.5).floor().clamp(0, most).int()
    return codes, torch.cat([steps, zeros], 1).masked_fill(~finite, float("nan"))


def minmax_decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[n, group]`` fp32 of ``codes [n, group]`` and ``scales [n, 2]`` fp16."""
    steps, zeros = scales.float().chunk(2, 1)
    return codes.float() * steps + zeros
