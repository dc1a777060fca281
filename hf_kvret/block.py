"""TokenBlock: some consecutive tokens of one layer, on their way into store and index."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenBlock:
    """Tokens ``start .. start + len(block)`` of every row of the batch.

    Attributes:
        keys: ``[B, Hkv, n, Dk]`` post-RoPE, as the model passed them to the cache.
        values: ``[B, Hkv, n, Dv]``.
        start: cache slot of the first token.
        valid: ``[B, n]`` bool, False for padding and holes; None when all are valid.
        positions: ``[B, n]`` integers, where the model's RoPE put the tokens; None unless the index
            keeps them (``Index.positions``).
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    valid: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.keys.shape[2]

    @property
    def end(self) -> int:
        """Slot after the last token."""
        return self.start + len(self)
