"""ParisKV with one part taken away, to measure what the part is worth. Not for use."""

from __future__ import annotations

from typing import ClassVar

import torch

from hf_kvret.contracts.index import ColdTokens
from hf_kvret.methods.paris.index import ParisConfig, ParisIndex, ParisKVCache
from hf_kvret_kernels import paris


class UncorrectedIndex(ParisIndex):
    """Without alpha: a subspace weighs ``r``, not ``r / alpha`` (eq. 7 to 9)."""

    def encode(self, keys: torch.Tensor) -> paris.ParisCodes:
        codes = super().encode(keys)
        rows = self.rotate(_center(keys, self._mean))
        codes.weight.copy_(rows.unflatten(-1, (-1, self.options.subspace_dim)).norm(dim=-1))
        return codes


class UnrotatedIndex(ParisIndex):
    """Without the rotation: subspaces are consecutive coordinates of the keys as they are.

    The encoder rotates, so it is given keys that its rotation brings back to where they were.
    """

    def rotate(self, query: torch.Tensor) -> torch.Tensor:
        if self._signs is None:
            raise RuntimeError("the index is empty: add a block first")
        return torch.nn.functional.pad(query.float(), (0, len(self._signs) - query.shape[-1]))

    def encode(self, keys: torch.Tensor) -> paris.ParisCodes:
        signs, levels = self._signs, self._levels
        if signs is None or levels is None:
            raise RuntimeError("the index is empty: add a block first")
        rows = self.rotate(_center(keys, self._mean))
        # An orthogonal map, whose inverse is its transposed matrix.
        rotation = paris.rotate(torch.eye(len(signs), device=signs.device), signs)
        source = rows @ rotation.mT
        return paris.encode(source, signs, levels, m=self.options.subspace_dim)

    def search_query(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.rotate(query), None

    def host_search(self, query: torch.Tensor, cold: ColdTokens) -> None:
        """None: the CPU library would rotate the query."""


class UncorrectedParisKVCache(ParisKVCache):
    """ParisKV without alpha."""

    name: ClassVar[str] = "paris-uncorrected"

    @classmethod
    def make_index(cls, options: ParisConfig, layer: int) -> ParisIndex:
        """A new, empty index; the same for every layer."""
        return UncorrectedIndex(options)


class UnrotatedParisKVCache(ParisKVCache):
    """ParisKV without the rotation."""

    name: ClassVar[str] = "paris-unrotated"

    @classmethod
    def make_index(cls, options: ParisConfig, layer: int) -> ParisIndex:
        """A new, empty index; the same for every layer."""
        return UnrotatedIndex(options)


def _center(keys: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    return keys.float() if mean is None else keys.float() - mean.unsqueeze(2)
