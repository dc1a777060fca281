"""From some layers to all of them: a straight line through two layer counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scaled:
    """An estimate for the whole model; not a measurement.

    Attributes:
        value: ``per_layer * layers + rest``.
        per_layer: what one layer adds.
        rest: what is there without layers: embedding, head, launch.
    """

    value: float
    per_layer: float
    rest: float


def scale(few: tuple[int, float], many: tuple[int, float], layers: int) -> Scaled:
    """What ``layers`` layers would take, from what two smaller numbers of layers took.

    Args:
        few, many: layers and their measured value each.

    Raises:
        ValueError: both have the same number of layers.
    """
    if few[0] == many[0]:
        raise ValueError(f"two runs with {few[0]} layers draw no line: give different numbers")
    per_layer = (many[1] - few[1]) / (many[0] - few[0])
    rest = many[1] - per_layer * many[0]
    return Scaled(per_layer * layers + rest, per_layer, rest)


def scale_rounds(
    few: tuple[int, Sequence[float]], many: tuple[int, Sequence[float]], layers: int
) -> tuple[float, float]:
    """Smallest and largest estimate over the rounds: how much noise the line has picked up."""
    estimates = [
        scale((few[0], first), (many[0], second), layers).value
        for first, second in zip(few[1], many[1], strict=True)
    ]
    return min(estimates), max(estimates)
