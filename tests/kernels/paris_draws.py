"""Random codes for tests of ParisKV's stage 1, and candidates as a sort finds them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from hf_kvret_kernels import paris

from .draws import generator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = ("naive", "triton")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
BACKENDS = ("naive", pytest.param("triton", marks=needs_triton))
TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(DEVICE)


def tools(head_dim: int, m: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs and levels."""
    signs = paris.random_signs(paris.rotated_dim(head_dim), seed=7)
    return signs.to(DEVICE), paris.magnitude_levels(m).to(DEVICE)


def random_sign(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator(seed), dtype=torch.uint8).to(DEVICE)


def random_valid(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Holes everywhere, and a last row without any valid token."""
    valid = torch.rand(batch, length, generator=generator(seed)) < 0.7
    valid[-1] = False
    return valid.to(DEVICE)


def candidates_by_sorting(scores: torch.Tensor, count: int) -> torch.Tensor:
    ids = torch.full((*scores.shape[:3], count), -1, dtype=torch.int32)
    for place in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        row = scores[tuple(place)].int().cpu()
        order = row.argsort(descending=True, stable=True)
        taken = order[row[order] != 255][:count].sort().values.int()
        ids[tuple(place)][: len(taken)] = taken
    return ids.to(DEVICE)
