"""Latent attention: a row is a token's latent and its rotated key, shared by all query heads.

Dimensions: B batch, H query heads, R latent rank, r rotated dims, n and v the unrotated dims of a
head's keys and its values. A head's key is ``W_UK latent`` beside the rotated key, its value
``W_UV latent``. So the query of few tokens is absorbed, ``W_UK^T q``, and attends to rows as they
are; the result, a mean of latents, goes through ``W_UV``. Many queries attend to expanded keys and
values instead, where that takes fewer operations. Source: DeepSeek-V2, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from hf_kvret.contracts.block import check_dtypes
from hf_kvret.layer.call import AttentionCall
from hf_kvret.layer.layer import HANDLE, RetrievalLayer


class LatentHeads(Protocol):
    """What a layer's attention makes of queries and rows."""

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, R + r]`` of ``query [B, H, Q, n + r]``, in its dtype."""

    def leave(self, latents: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, v]`` of means of latents ``[B, H, Q, R]``."""

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[B, H, m, n + r]`` and values ``[B, H, m, v]`` of ``rows [B, 1, m, R + r]``."""

    def expanded_numbers(self, rows: torch.Tensor) -> int:
        """Numbers that keys and values of one row have, of all heads."""

    def expands(self, queries: int) -> bool:
        """Whether to expand rows takes fewer operations than to absorb so many queries."""


def expanding_pays(queries: int, rank: int, head_numbers: int) -> bool:
    """Whether to expand rows takes fewer operations than to absorb so many queries.

    Of a row and head, expanding takes R (n + v) products, and 2 R - n - v fewer for each query.

    Args:
        queries: that attend to each row.
        rank: R.
        head_numbers: n + v, numbers that a head makes of a latent.
    """
    return queries * (2 * rank - head_numbers) > rank * head_numbers


@dataclass(frozen=True, eq=False)
class LatentCall(AttentionCall):
    """An attention call of a layer with latent attention."""

    makes_rows: ClassVar[bool] = True

    heads: LatentHeads = field(kw_only=True)

    def to_rows(self, query: torch.Tensor) -> torch.Tensor:
        return self.heads.absorb(query)

    def from_rows(self, out: torch.Tensor) -> torch.Tensor:
        return self.heads.leave(out)

    def expands(self, queries: int) -> bool:
        return self.heads.expands(queries)

    def of_rows(self) -> AttentionCall:
        return AttentionCall(self.scoring, self.prompt, self.sink_logits, self.positions)

    def keys_and_values(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.heads.expand(keys)

    def row_numbers(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        return self.heads.expanded_numbers(keys)


class LatentLayer(RetrievalLayer):
    """Cache of a layer with latent attention: one KV head, whose value is the start of the key."""

    # Of the tokens that wait for their attention.
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
        self._given = (value_states.data_ptr(), key_states.shape, value_states.shape)
        handle = key_states.detach()
        setattr(handle, HANDLE, self)
        return handle, value_states

    def rows_of(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, self._new_rows = self._new_rows, None
        if rows is None:
            # They were taken in before.
            rows = torch.cat((key, value), dim=-1)
        return rows, rows[..., : key.shape[3]]
