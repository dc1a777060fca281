"""Basis: what keys and queries of one layer are turned into codes with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvret_kernels import paris


@dataclass(frozen=True)
class Basis:
    """Rotation, levels and mean key of a layer, fixed by its first block (section 4.1).

    Attributes:
        signs: ``[P]`` fp32, the random signs of the rotation.
        levels: ``[8]`` fp32 magnitudes.
        mean: ``[B, Hkv, D]`` fp32 key to subtract, or None.
        m: coordinates of a subspace.
    """

    signs: torch.Tensor
    levels: torch.Tensor
    mean: torch.Tensor | None
    m: int

    def rotate(self, query: torch.Tensor) -> torch.Tensor:
        """``[..., P]`` fp32 of ``query [..., D]``, in the coordinates of the codes."""
        return paris.rotate(query, self.signs)

    def encode(self, keys: torch.Tensor) -> paris.ParisCodes:
        """Codes of ``keys [B, Hkv, n, D]``."""
        return paris.encode(keys, self.signs, self.levels, m=self.m, mean=self.mean)
