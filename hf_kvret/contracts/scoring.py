"""Scoring: how queries are compared with the tokens of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, eq=False)
class Scoring:
    """A score is ``scale * q.k``, or ``softcap * tanh(scale * q.k / softcap)``.

    Attributes:
        valid: ``[B, n]`` bool, False for tokens that no query attends to; None: all are valid.
        scale: factor of the dot products before the softmax.
        softcap: or None. It keeps the order of tokens within a head, but changes comparisons
            between the heads of a group.
    """

    valid: torch.Tensor | None
    scale: float
    softcap: float | None = None

    def of(self, valid: torch.Tensor | None) -> Self:
        """The same scoring with another ``valid``."""
        return type(self)(valid, self.scale, self.softcap)

    def reordered(self, rows: torch.Tensor) -> Self:
        """The same scoring for the batch whose row b is the old row ``rows[b]``."""
        return self if self.valid is None else self.of(self.valid.index_select(0, rows))
