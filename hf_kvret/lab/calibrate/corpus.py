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
        ValueError: sequences or ``held_out`` are not so.
    """

    sequences: list[torch.Tensor]
    held_out: int
    description: dict[str, Any]

    def __post_init__(self) -> None:
        for ids in self.sequences:
            if ids.ndim != 1 or not len(ids) or ids.dtype != torch.int64:
                raise ValueError(
                    f"a sequence is {ids.dtype} of shape {list(ids.shape)}: pass int64 token ids "
                    "[n], at least one"
                )
        if not 0 <= self.held_out < len(self.sequences):
            raise ValueError(
                f"held_out={self.held_out} of {len(self.sequences)} sequences: at least one must "
                "be left to learn from"
            )

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.sequences))
