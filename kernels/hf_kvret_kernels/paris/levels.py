"""The eight magnitude levels: a Lloyd-Max quantizer for coordinates of a random direction."""

from __future__ import annotations

from functools import lru_cache

import torch

_GRID = 1 << 16
_MAX_ROUNDS = 20_000
_TOLERANCE = 1e-9


def magnitude_levels(m: int, count: int = 8) -> torch.Tensor:
    """``[count]`` fp32 on the CPU, ascending in (0, 1): levels for ``|u_j|``.

    ``u`` is uniform on the unit sphere of ``R^m``, so that ``u_j`` has a density proportional
    to ``(1 - x^2)^((m - 3) / 2)`` (ParisKV, proposition 4.1, eq. 12). Among all quantizers
    with ``count`` levels these have the least mean squared error; a magnitude belongs to the
    nearest level, so the boundaries are the midpoints. Converged here, where the authors'
    table (0.0420, 0.1266, ... for m = 8) stops a little early.

    Raises:
        ValueError: ``m`` below 3 (the density has a pole at 1) or ``count`` below 1.
    """
    if m < 3:
        raise ValueError(f"m={m}: subspaces of at least 3 coordinates have such levels")
    if count < 1:
        raise ValueError(f"count={count}: at least one level is needed")
    # Whatever a user has made torch's default device.
    with torch.device("cpu"):
        return _converged_levels(m, count).clone()


@lru_cache(maxsize=16)
def _converged_levels(m: int, count: int) -> torch.Tensor:
    """Lloyd's iteration in fp64: levels to midpoints to the means between the midpoints."""
    width = 1.0 / _GRID
    centre = (torch.arange(_GRID, dtype=torch.float64) + 0.5) * width
    density = (1.0 - centre.square()).pow((m - 3) / 2)
    start = torch.zeros(1, dtype=torch.float64)
    mass = torch.cat([start, density.cumsum(0)]) * width
    moment = torch.cat([start, (density * centre).cumsum(0)]) * width

    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    end = torch.ones(1, dtype=torch.float64)
    for _ in range(_MAX_ROUNDS):
        edges = torch.cat([start, (levels[1:] + levels[:-1]) / 2, end])
        new_levels = _interpolate(moment, edges).diff() / _interpolate(mass, edges).diff()
        change = (new_levels - levels).abs().max().item()
        levels = new_levels
        if change < _TOLERANCE:
            break
    return levels.float()


def _interpolate(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Values at ``x`` in [0, 1] of a function given on the grid's edges, linear in between."""
    place = x * _GRID
    index = place.floor().long().clamp(max=_GRID - 1)
    share = place - index
    return table[index] * (1 - share) + table[index + 1] * share
