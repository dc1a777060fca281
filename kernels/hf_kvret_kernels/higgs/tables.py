"""What the HIGGS codec looks up: grid points and signs, made once for each device."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch

GRIDS = Path(__file__).with_name("grids.json")


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
def random_signs(group: int, seed: int | None, device: torch.device) -> torch.Tensor:
    """``[group]`` fp32 of +1 and -1, drawn on the CPU and so equal everywhere; None: all +1."""
    if seed is None:
        return torch.ones(group, dtype=torch.float32, device=device)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    bits = torch.randint(0, 2, (group,), generator=generator, device="cpu")
    return (bits.float() * 2 - 1).to(device)
