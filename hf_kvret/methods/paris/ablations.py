"""ParisKV with one part taken away, to measure what the part is worth. Not for use."""

from __future__ import annotations

from typing import ClassVar

import torch

from hf_kvret.methods.paris.basis import Basis
from hf_kvret.methods.paris.cache import ParisKVCache
from hf_kvret_kernels import paris


class UncorrectedBasis(Basis):
    """Without alpha: a subspace weighs ``r``, not ``r / alpha`` (eq. 7 to 9)."""

    def encode(self, keys: torch.Tensor) -> paris.ParisCodes:
        codes = super().encode(keys)
        lengths = self.rotate(_centered(keys, self.mean)).unflatten(-1, (-1, self.m)).norm(dim=-1)
        codes.weight.copy_(lengths)
        return codes


class UnrotatedBasis(Basis):
    """Without the rotation: subspaces are consecutive coordinates of the keys as they are.

    The encoder rotates, so it is given keys that its rotation brings back to where they were.
    """

    def rotate(self, query: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(query.float(), (0, len(self.signs) - query.shape[-1]))

    def encode(self, keys: torch.Tensor) -> paris.ParisCodes:
        padded = self.rotate(_centered(keys, self.mean))
        # Signs, then a symmetric transform that is its own inverse; undone in the other order.
        turned = paris.rotate(padded, torch.ones_like(self.signs)) * self.signs
        return paris.encode(turned, self.signs, self.levels, m=self.m)


class UncorrectedParisKVCache(ParisKVCache):
    """ParisKV without alpha."""

    name: ClassVar[str] = "paris-uncorrected"
    basis_class: ClassVar[type[Basis]] = UncorrectedBasis


class UnrotatedParisKVCache(ParisKVCache):
    """ParisKV without the rotation."""

    name: ClassVar[str] = "paris-unrotated"
    basis_class: ClassVar[type[Basis]] = UnrotatedBasis


def _centered(keys: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    return keys.float() if mean is None else keys.float() - mean.unsqueeze(2)
