"""Wrong ids, offsets and counts for a tensor of whole numbers in a crafted cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from .mutations import Craft, Tensors


def crafted_ids(name: str, dtype: torch.dtype) -> Iterator[Craft]:
    """Wrong numbers in the first place of a tensor, in the last, or everywhere."""
    limits = torch.iinfo(dtype) if dtype != torch.bool else None
    numbers = {0, -1, -2, 60, 2**20, 2**31 - 1, 2**62}
    if limits is not None:
        numbers = {limits.min, limits.max, *(n for n in numbers if limits.min < n < limits.max)}
    for number in sorted(numbers if limits else {0, 1}):
        for places in (slice(0, 1), slice(-1, None), slice(None)):

            def craft(
                _: random.Random,
                tensors: Tensors,
                __: dict[str, Any],
                number: int = number,
                places: slice = places,
            ) -> None:
                tensors[name].view(-1)[places] = number

            yield craft
