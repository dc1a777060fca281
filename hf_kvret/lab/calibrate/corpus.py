"""Corpus: the token sequences that a calibration learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Corpus:
    """Sequences of token ids, and what they are.

    Attributes:
        sequences: ``[n]`` int64 each, none empty.
        held_out: how many of the last are not learned from; fewer than there are.
        description: plain JSON.

    Raises:
        ValueError: ``held_out`` leaves nothing to learn from.
    """

    sequences: list[torch.Tensor]
    held_out: int
    description: dict[str, Any]

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < len(self.sequences):
            raise ValueError(
                f"held_out={self.held_out} of {len(self.sequences)} sequences: at least one must "
                "be left to learn from"
            )

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.sequences))
