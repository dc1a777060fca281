"""ParisKV with a part off: exactly that part is off."""

from __future__ import annotations

import math

import pytest
import torch

from hf_kvret import TokenBlock
from hf_kvret.lab.evaluate.paris_ablations import (
    UncorrectedIndex,
    UncorrectedParisKVCache,
    UnrotatedIndex,
    UnrotatedParisKVCache,
)
from hf_kvret.methods.paris import ParisConfig, ParisIndex
from hf_kvret.testing import MODELS
from hf_kvret.testing.cold import cold_tokens
from hf_kvret_kernels import paris

M = 8


def _keys(dim: int, count: int = 50) -> torch.Tensor:
    return torch.randn(2, 3, count, dim, generator=torch.Generator().manual_seed(dim))


def _coder(cls: type[ParisIndex], dim: int, mean: torch.Tensor | None = None) -> ParisIndex:
    """An index that can encode keys and has seen none."""
    index = cls(ParisConfig())
    index._make_basis(dim, torch.device("cpu"))
    index._mean = mean
    return index


def _estimates(coder: ParisIndex, keys: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Estimated inner products of each key with ``target`` of its own, by subspace."""
    assert coder._levels is not None
    decoded = paris.decode(coder.encode(keys), coder._levels, m=M)
    return (decoded * coder.rotate(target)).unflatten(-1, (-1, M)).sum(-1)


def test_without_alpha_every_key_is_estimated_too_short() -> None:
    keys = _keys(64)
    squares = _coder(ParisIndex, 64).rotate(keys).unflatten(-1, (-1, M)).square().sum(-1)
    # Weights are bf16, which is good for a relative 2 ** -9.
    corrected = _estimates(_coder(ParisIndex, 64), keys, keys) / squares
    assert (corrected - 1).abs().max() < 2**-8
    short = _estimates(_coder(UncorrectedIndex, 64), keys, keys) / squares
    # alpha: below 1 for the length that quantization loses, and not the same for all.
    assert 0.95 < short.mean() < 0.995 and short.std() > 0.005


@pytest.mark.parametrize("dim", [40, 64, 160])
def test_without_rotation_codes_are_those_of_the_coordinates(dim: int) -> None:
    keys = _keys(dim)
    mean = keys.mean(dim=2)
    coder = _coder(UnrotatedIndex, dim, mean)
    codes = coder.encode(keys)
    centered = keys - mean.unsqueeze(2)
    bits = (centered[..., : dim // 8 * 8] >= 0).int().unflatten(-1, (-1, 8))
    bytes_each = (bits << torch.arange(8)).sum(-1).to(torch.uint8)
    assert torch.equal(codes.sign[..., : dim // 8], bytes_each)
    assert torch.equal(coder.rotate(keys)[..., :dim], keys)
    assert coder._levels is not None
    decoded = paris.decode(codes, coder._levels, m=M)
    # As precise as the rotated code: eight levels a coordinate.
    error = (decoded - coder.rotate(centered)).norm() / centered.norm()
    assert error < 0.15


def test_rotation_is_what_makes_a_few_large_coordinates_harmless() -> None:
    """Keys of real models have such coordinates; without rotation few subspaces hold them all."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(1, 1, 2000, 64, generator=generator)
    keys[..., [3, 17, 30, 52]] *= 12
    query = torch.randn(1, 1, 32, 64, generator=generator)
    valid = torch.ones(1, 2000, dtype=torch.bool)
    best = (query @ keys.transpose(-1, -2)).topk(50, dim=-1).indices
    hits = {}
    for cls in (ParisIndex, UnrotatedIndex):
        index = cls(ParisConfig(schedule=((math.inf, 0.1, 0.2),)))
        index.add(TokenBlock(keys, keys, 0))
        ids = index.search(query, cold_tokens(valid, 0.1, 50))
        hits[cls] = (ids.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean().item()
    assert hits[ParisIndex] > hits[UnrotatedIndex] + 0.07


def test_the_caches_hold_such_indexes() -> None:
    config = MODELS["qwen3"].config()
    for cache_class, cls in (
        (UncorrectedParisKVCache, UncorrectedIndex),
        (UnrotatedParisKVCache, UnrotatedIndex),
    ):
        cache = cache_class(config)
        index = cache.make_index(cache.options, 0)
        index.add(TokenBlock(_keys(64), _keys(64), 0))
        assert type(index) is cls
