"""The grids are as good as they should be, and so is what the codec makes of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_kvret_kernels.higgs import HiggsCodec
from hf_kvret_kernels.higgs.naive import grid_points

CPU = torch.device("cpu")
# Squared error of a number of a standard normal pair with the best 16, 64 and 256 points.
BEST = {2: 0.1075, 3: 0.0296, 4: 0.0077}
SCRIPT = Path(__file__).parents[2] / "examples" / "make_higgs_grids.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_higgs_grids", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bits", BEST)
def test_grids_have_the_least_error(script: ModuleType, bits: int) -> None:
    points = grid_points(bits, CPU)
    assert points.shape == (4**bits, 2) and points.unique(dim=0).shape == points.shape
    assert torch.equal(points.half().float(), points)
    assert script.squared_error(points.double(), 400) == pytest.approx(BEST[bits], rel=0.02)


@pytest.mark.parametrize("bits", BEST)
def test_points_are_the_means_of_what_is_rounded_to_them(script: ModuleType, bits: int) -> None:
    """So another round of Lloyd's iteration moves none by more than the lattice is wide."""
    points = grid_points(bits, CPU).double()
    moved = script.lloyd(points, 400, 1) - points
    assert moved.norm(dim=1).max() < 2 * script.REACH / 400


@pytest.mark.parametrize("group", [128, 256, 1024])
@pytest.mark.parametrize("bits", BEST)
def test_normal_numbers_lose_as_much_through_the_codec(bits: int, group: int) -> None:
    """Shorter groups lose less: their largest numbers are smaller, and the scale knows of them."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(bits))
    codec = HiggsCodec(bits, group)
    error = (codec.decode(*codec.encode(x)) - x).square().mean().item()
    assert error == pytest.approx(BEST[bits], rel=0.02)


def test_a_constant_offset_hurts_only_without_signs() -> None:
    """Errors as shares of the mean square; the offset is three times the deviation."""
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)) + 3.0
    size = x.square().mean()
    errors = {}
    for signs in (True, False):
        codec = HiggsCodec(2, 1024, signs=signs)
        errors[signs] = ((codec.decode(*codec.encode(x)) - x).square().mean() / size).item()
    assert errors[True] == pytest.approx(BEST[2], rel=0.03)
    assert errors[False] == pytest.approx(0.85, rel=0.03)


@pytest.mark.slow
def test_the_script_makes_the_grids_that_are_shipped(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.equal(script.make_grid(2).float(), grid_points(2, CPU))
