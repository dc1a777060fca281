"""The heads of a module with multi-head latent attention, as transformers lays them out."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvret.layer.latent import expanding_pays
from hf_kvret.models.projection import Affine, affine
from hf_kvret_model_patches import latent


class ModuleHeads:
    """See ``core.latent.LatentHeads``; of one call: weights may change between calls.

    Args:
        module: the attention of a layer, with ``kv_b_proj`` and dims named as in transformers.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._rank: int = module.kv_lora_rank
        self._nope: int = module.qk_nope_head_dim
        self._value_dim: int = module.v_head_dim
        self._made: Affine | None = None

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        nope, rope = query[..., : self._nope], query[..., self._nope :]
        to_keys = self._matrices(query)[:, : self._nope]
        return torch.cat([torch.einsum("bhqn,hnr->bhqr", nope, to_keys), rope], dim=-1)

    def leave(self, latents: torch.Tensor) -> torch.Tensor:
        to_values = self._matrices(latents)[:, self._nope :]
        values = torch.einsum("bhqr,hvr->bhqv", latents, to_values)
        offset = self._affine(latents).offset
        if offset is None:
            return values
        # Weights sum to one. What an offset adds to keys, it adds to all scores of a query alike.
        return values + offset.view(-1, 1, self._nope + self._value_dim)[..., self._nope :]

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.expand_new(rows[..., : self._rank], rows[..., self._rank :])

    def expand_new(
        self, latents: torch.Tensor, rope_keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``expand``, of latents ``[B, 1, m, R]`` and rotated keys ``[B, 1, m, r]``."""
        return latent.expand(self._module, latents, rope_keys)

    def expanded_numbers(self, rows: torch.Tensor) -> int:
        of_head = self._nope + rows.shape[3] - self._rank + self._value_dim
        return self._matrices(rows).shape[0] * of_head

    def expands(self, queries: int) -> bool:
        return expanding_pays(queries, self._rank, self._nope + self._value_dim)

    def _matrices(self, like: torch.Tensor) -> torch.Tensor:
        """``[H, n + v, R]``: ``kv_b_proj`` for each head."""
        return self._affine(like).matrix.reshape(-1, self._nope + self._value_dim, self._rank)

    def _affine(self, like: torch.Tensor) -> Affine:
        if self._made is None:
            self._made = affine(self._module.kv_b_proj, like, self._rank)
        return self._made
