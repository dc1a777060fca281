"""Latent attention: a row is a token's latent and its rotated key, shared by all query heads.

Dimensions: B batch, H query heads, R latent rank, r rotated dims, n and v the unrotated dims of a
head's keys and its values. A head's key is ``W_UK latent`` beside the rotated key, its value
``W_UV latent``. So the query of few tokens is absorbed, ``W_UK^T q``, and attends to rows as they
are; the result, a mean of latents, goes through ``W_UV``. Many queries attend to expanded keys and
values instead, where that takes fewer operations. Source: DeepSeek-V2, section 2.1.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hf_kvret.contracts.block import check_dtypes
from hf_kvret.layer.layer import HANDLE, RetrievalLayer
from hf_kvret.layer.queries import Heads
from hf_kvret.models.products import Affine, affine
from hf_kvret_model_patches import latent


class ModuleHeads(Heads):
    """What a layer's attention makes of queries and rows, in one call: weights may change.

    Args:
        module: the attention of a layer, with ``kv_b_proj`` and dims named as in transformers.
    """

    makes_rows: ClassVar[bool] = True

    def __init__(self, module: Any) -> None:
        self._module = module
        self._rank: int = module.kv_lora_rank
        self._nope: int = module.qk_nope_head_dim
        self._value_dim: int = module.v_head_dim
        self._affine_map: Affine | None = None

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, R + r]`` of ``query [B, H, Q, n + r]``, in its dtype."""
        nope, rope = query[..., : self._nope], query[..., self._nope :]
        to_keys = self._matrices(query)[:, : self._nope]
        return torch.cat([torch.einsum("bhqn,hnr->bhqr", nope, to_keys), rope], dim=-1)

    def project_values(self, out: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, v]`` of means of latents ``[B, H, Q, R]``."""
        to_values = self._matrices(out)[:, self._nope :]
        values = torch.einsum("bhqr,hvr->bhqv", out, to_values)
        offset = self._affine(out).offset
        if offset is None:
            return values
        # Weights sum to one. What an offset adds to keys, it adds to all scores of a query alike.
        return values + offset.view(-1, 1, self._nope + self._value_dim)[..., self._nope :]

    def expand(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[B, H, m, n + r]`` and values ``[B, H, m, v]`` of rows ``[B, 1, m, R + r]``."""
        return self.expand_new(keys[..., : self._rank], keys[..., self._rank :])

    def expand_new(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``expand``, of latents ``[B, 1, m, R]`` and rotated keys ``[B, 1, m, r]``."""
        return latent.expand(self._module, keys, values)

    def expanded_elements(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        of_head = self._nope + keys.shape[3] - self._rank + self._value_dim
        return self._matrices(keys).shape[0] * of_head

    def expands(self, queries: int) -> bool:
        """Whether to expand rows takes fewer operations than to absorb so many queries.

        Of a row and head, expanding takes R (n + v) products, and 2 R - n - v fewer for each query.
        """
        made = self._nope + self._value_dim
        return queries * (2 * self._rank - made) > self._rank * made

    def _matrices(self, like: torch.Tensor) -> torch.Tensor:
        """``[H, n + v, R]``: ``kv_b_proj`` for each head."""
        return self._affine(like).matrix.reshape(-1, self._nope + self._value_dim, self._rank)

    def _affine(self, like: torch.Tensor) -> Affine:
        if self._affine_map is None:
            self._affine_map = affine(self._module.kv_b_proj, like, self._rank)
        return self._affine_map


class LatentLayer(RetrievalLayer):
    """Cache of a layer with latent attention: one KV head, whose value is the start of the key."""

    is_latent = True
    # Rows of the tokens whose attention is pending.
    _new_rows: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note new tokens: latents ``[B, 1, n, R]`` and rotated keys ``[B, 1, n, r]``.

        Returns both, the latents with a handle to this layer. Errors as of ``RetrievalLayer``.
        """
        check_dtypes(latents=key_states, rotated_keys=value_states)
        rows = torch.cat((key_states, value_states), dim=-1)
        super().update(rows, rows[..., : key_states.shape[3]])
        self._new_rows = rows
        self._update_key = (value_states.data_ptr(), key_states.shape, value_states.shape)
        handle = key_states.detach()
        setattr(handle, HANDLE, self)
        return handle, value_states

    def rows_of(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, self._new_rows = self._new_rows, None
        if rows is None:
            # The layer holds them already.
            rows = torch.cat((key, value), dim=-1)
        return rows, rows[..., : key.shape[3]]
