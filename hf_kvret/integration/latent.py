"""The heads of a module with multi-head latent attention, as transformers lays them out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_kvret_model_patches import latent


class ModuleHeads:
    """See ``core.latent.LatentHeads``; of one call, between which weights may change.

    Args:
        module: the attention of a layer, with ``kv_b_proj`` and dims named as in transformers.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._rank: int = module.kv_lora_rank
        self._nope: int = module.qk_nope_head_dim
        self._value_dim: int = module.v_head_dim
        self._made: torch.Tensor | None = None

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        nope, rope = query[..., : self._nope], query[..., self._nope :]
        to_keys = self._matrices(query)[:, : self._nope]
        return torch.cat([torch.einsum("bhqn,hnr->bhqr", nope, to_keys), rope], dim=-1)

    def leave(self, latents: torch.Tensor) -> torch.Tensor:
        to_values = self._matrices(latents)[:, self._nope :]
        return torch.einsum("bhqr,hvr->bhqv", latents, to_values)

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
        """Of a row and head, expanding takes R (n + v) products, and 2 R - n - v fewer a query."""
        made = self._nope + self._value_dim
        return queries * (2 * self._rank - made) > self._rank * made

    def _matrices(self, like: torch.Tensor) -> torch.Tensor:
        """``[H, n + v, R]``: ``kv_b_proj`` for each head."""
        if self._made is not None:
            return self._made
        projection = self._module.kv_b_proj
        if _is_plain(projection):
            matrix = projection.weight
        else:
            # Adapters, quantized weights, weights that a hook brings: it is linear all the same.
            identity = torch.eye(self._rank, dtype=like.dtype, device=like.device)
            matrix = projection(identity).T
        self._made = matrix.reshape(-1, self._nope + self._value_dim, self._rank)
        return self._made


def _is_plain(projection: nn.Module) -> bool:
    """Whether the module is its weight: a linear one that nobody wrapped, hooked or distributed."""
    if type(projection) is not nn.Linear or projection.bias is not None:
        return False
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    is_own = type(projection.weight) is nn.Parameter and "forward" not in projection.__dict__
    return is_own and not hooks and not nn.utils.parametrize.is_parametrized(projection)
