"""Compute the point grids of the HIGGS codec and write them beside the kernels.

    python examples/make_higgs_grids.py

For 2, 3 and 4 bits a number, 16, 64 and 256 points of the plane are moved by Lloyd's iteration
until the mean squared distance of a standard normal pair to its nearest point stops falling.
Integrals are sums over the cells of a square lattice. From one start the iteration ends in a
minimum that is 2% above the best for 256 points; so the points are shaken, less from round to
round, and of several such tries the best is kept. The generator's seeds are fixed: the same grids
come out again. Points are kept as fp16 numbers: a pair then is one 32-bit word of the kernels'
tables. Takes about ten minutes on one core.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

GRIDS = Path(__file__).parents[1] / "kernels" / "hf_kvret_kernels" / "higgs" / "grids.json"
BITS = (2, 3, 4)
# Half the side of the square that is integrated over: one pair of 10^8 lies outside.
REACH = 6.0
# Lattice cells along a side while points are shaken, while they settle, for the last word.
COARSE, FINE, FINAL = 200, 800, 1600
ROUNDS_SHAKEN, ROUNDS_SETTLING = 300, 60
# For each number of bits: tries, and how far points are shaken at first, in their distances.
TRIES = {2: (40, 0.2), 3: (40, 0.2), 4: (8, 0.1)}
_AT_ONCE = 1 << 16


def spiral(count: int) -> torch.Tensor:
    """``[count, 2]`` fp64: a sunflower with the best density, that of a normal pair of variance 2.

    The density of an optimal quantizer in the plane goes with the square root of the data's.
    """
    place = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    radius = 2 * (-(1 - place).log()).sqrt()
    angle = torch.arange(count, dtype=torch.float64) * math.pi * (3 - math.sqrt(5))
    return radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)


def normal_lattice(cells: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Middles ``[cells^2, 2]`` fp64 of the cells, and their shares of a normal pair's mass."""
    side = ((torch.arange(cells, dtype=torch.float64) + 0.5) / cells * 2 - 1) * REACH
    density = (-side.square() / 2).exp()
    mass = density[:, None] * density[None, :]
    return torch.cartesian_prod(side, side), mass.flatten() / mass.sum()


def nearest(places: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """``[N]`` int64: the nearest point of each place."""
    half = points.square().sum(1) / 2
    indices = (torch.addmm(-half, chunk, points.T).argmax(1) for chunk in places.split(_AT_ONCE))
    return torch.cat(list(indices))


def squared_error(points: torch.Tensor, cells: int = FINAL) -> float:
    """Mean squared error of one number of a standard normal pair."""
    places, mass = normal_lattice(cells)
    missed = (places - points[nearest(places, points)]).square().sum(1)
    return (missed * mass).sum().item() / 2


def lloyd(
    points: torch.Tensor,
    cells: int,
    rounds: int,
    shake: float = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``points`` after ``rounds`` moves to the means of what is nearest to them.

    With ``shake`` each move adds noise that fades to nothing at the end.
    """
    places, mass = normal_lattice(cells)
    moments = places * mass[:, None]
    for number in range(rounds):
        owner = nearest(places, points)
        masses = torch.zeros(len(points), dtype=torch.float64).index_add_(0, owner, mass)
        sums = torch.zeros_like(points).index_add_(0, owner, moments)
        points = torch.where(masses[:, None] > 0, sums / masses[:, None], points)
        if shake:
            # Neighbours are the farther apart the farther out, where points are thin.
            apart = (points.square().sum(1, keepdim=True) / 8).exp() * (8 / len(points)) ** 0.5
            noise = torch.randn(points.shape, generator=generator, dtype=torch.float64)
            points = points + shake * (1 - number / rounds) ** 2 * apart.clamp_max(1.0) * noise
    return points


def make_grid(bits: int) -> torch.Tensor:
    """``[4^bits, 2]`` fp64 of fp16 numbers, sorted: the grid for ``bits`` bits a number."""
    tries, shake = TRIES[bits]
    settled = []
    for seed in range(tries):
        generator = torch.Generator().manual_seed(seed)
        points = lloyd(spiral(4**bits), COARSE, ROUNDS_SHAKEN, shake, generator)
        settled.append(lloyd(points, COARSE, ROUNDS_SETTLING))
    best = min(settled, key=lambda points: squared_error(points, FINE))
    best = lloyd(best, FINE, ROUNDS_SETTLING)
    return torch.tensor(sorted(best.half().double().tolist()), dtype=torch.float64)


def main() -> None:
    lines = []
    for bits in BITS:
        points = make_grid(bits)
        print(f"{bits} bits: {len(points)} points, error {squared_error(points):.6f} a number")
        lines.append(f'"{bits}": {json.dumps(points.tolist())}')
    GRIDS.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
