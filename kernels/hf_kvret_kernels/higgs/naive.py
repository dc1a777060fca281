"""The codec in plain torch, fp32 throughout, and what they look up.

Groups are the rows ``[n, group]`` of a matrix here; inputs were checked by the wrappers.

Codes of 4, 6 or 8 bits, one for each pair of numbers, are put, the first one lowest, into words of
whole bytes: one byte holds two codes of 4 bits or one of 8; three bytes hold four codes of 6. A
row's bytes lie in planes: all lowest bytes of its words, then all middle and all highest ones,
where words have three. So reading neighbouring words reads neighbouring bytes, whatever the width.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch

from hf_kvret_kernels.paris.naive import hadamard

# Bits of a code: codes of a word, bytes of a word.
WORDS = {4: (2, 1), 6: (4, 3), 8: (1, 1)}
GRIDS = Path(__file__).with_name("grids.json")
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
    chunks = pairs.split(max(1, _MOST_SCORES // len(merits)))
    parts = [torch.addmm(-merits[:, 2], chunk, merits[:, :2].T).argmax(1) for chunk in chunks]
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


def pack(codes: torch.Tensor, code_bits: int) -> torch.Tensor:
    """``[..., n * code_bits / 8]`` uint8 of the rows ``codes [..., n]``.

    Args:
        codes: integers of any dtype, 0 to ``2^code_bits - 1``; n fills whole words.
        code_bits: 4, 6 or 8.
    """
    per_word, planes = WORDS[code_bits]
    shifts = code_bits * torch.arange(per_word, dtype=torch.int32, device=codes.device)
    words = (codes.int().unflatten(-1, (-1, per_word)) << shifts).sum(-1, dtype=torch.int32)
    lanes = 8 * torch.arange(planes, dtype=torch.int32, device=codes.device)
    return ((words.unsqueeze(-2) >> lanes[:, None]) & 255).to(torch.uint8).flatten(-2)


def unpack(codes: torch.Tensor, code_bits: int) -> torch.Tensor:
    """The inverse of ``pack``: ``[..., n]`` int32 of ``codes [..., n * code_bits / 8]`` uint8."""
    per_word, planes = WORDS[code_bits]
    lanes = 8 * torch.arange(planes, dtype=torch.int32, device=codes.device)
    bytes_ = codes.int().unflatten(-1, (planes, codes.shape[-1] // planes))
    words = (bytes_ << lanes[:, None]).sum(-2, dtype=torch.int32)
    shifts = code_bits * torch.arange(per_word, dtype=torch.int32, device=codes.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << code_bits) - 1)).flatten(-2)


@lru_cache(maxsize=1)
def _read_grids() -> dict[int, list[list[float]]]:
    with GRIDS.open(encoding="utf-8") as file:
        return {int(bits): points for bits, points in json.load(file).items()}


@lru_cache(maxsize=64)
def grid_points(bits: int, device: torch.device) -> torch.Tensor:
    """``[4^bits, 2]`` fp32, fp16 numbers all: the points that pairs are rounded to.

    They minimize the squared error of a standard normal pair; ``examples/make_higgs_grids.py``
    computes them. Not to be written to: callers share it.
    """
    return torch.tensor(_read_grids()[bits], dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def grid_merits(bits: int, device: torch.device) -> torch.Tensor:
    """``[4^bits, 3]`` fp32: ``x``, ``y`` and ``(x^2 + y^2) / 2`` of each point; shared."""
    points = grid_points(bits, device)
    return torch.cat([points, points.square().sum(1, keepdim=True) / 2], 1)


@lru_cache(maxsize=64)
def grid_words(bits: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """``[4^bits]`` int32: each point as two numbers, x in the low half; shared.

    ``dtype``: fp16, in which points are exact, or bf16, to which they are rounded.
    """
    return grid_points(bits, device).to(dtype).view(torch.int32).flatten()


@lru_cache(maxsize=64)
def random_signs(group: int, seed: int, device: torch.device) -> torch.Tensor:
    """``[group]`` fp32 of +1 and -1, drawn on the CPU and so equal everywhere."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    bits = torch.randint(0, 2, (group,), generator=generator, device="cpu")
    return (bits.float() * 2 - 1).to(device)
