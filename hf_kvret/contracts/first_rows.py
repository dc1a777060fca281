"""The first rows that a layer's store is made for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvret.contracts.block import TokenBlock


@dataclass(frozen=True)
class FirstRows:
    """What is at hand when a store is made.

    Attributes:
        device: of the queries.
        nbytes: bytes of the first block, or of a saved store.
        keys: ``[B, Hkv, n, Dk]`` of the first block, or of all rows of a saved store; None where
            these are codes.
        valid: ``[B, n]`` bool, False for padding; None when all are valid.
    """

    device: torch.device
    nbytes: int
    keys: torch.Tensor | None
    valid: torch.Tensor | None = None

    @classmethod
    def of(cls, block: TokenBlock) -> FirstRows:
        """Those of a layer's first block."""
        return cls(block.keys.device, block.nbytes, block.keys, block.valid)

    @property
    def are_codes(self) -> bool:
        """Whether they come from a saved store of coded rows."""
        return self.keys is None
