"""What an attention call asks of a layer, and how its queries are laid out for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch

from hf_kvret.contracts.index import Scoring


class NewTokens(NamedTuple):
    """Queries ``[B, Hq, Q, *]`` of a call, and the rows ``[B, Hkv, n, D]`` of its new tokens."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Heads:
    """What the heads of a layer make of queries and rows for attention: nothing, as here."""

    # Whether ``expand`` makes tensors with memory of their own.
    makes_rows: ClassVar[bool] = False

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """``query [B, Hq, Q, *]`` as rows are compared with it, ``[B, Hq, Q, Dk]``."""
        return query

    def project_values(self, out: torch.Tensor) -> torch.Tensor:
        """The attention's result of a mean of rows' values ``[B, Hq, Q, Dv]``."""
        return out

    def expands(self, queries: int) -> bool:
        """Whether so many queries, as they are, attend exactly to what rows are expanded to."""
        return False

    def expand(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What queries as they are attend to, of rows ``[B, Hkv, n, D]``."""
        return keys, values

    def expand_new(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``expand``, of keys and values as the model passes them."""
        return keys, values

    def expanded_elements(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Elements of what one row is expanded to, of all heads; rows are examples."""
        return keys.shape[1] * (keys.shape[3] + values.shape[3])


class AttentionCall(NamedTuple):
    """Arguments of one attention call other than query, key and value.

    Attributes:
        scoring: ``valid [B, T]`` over all slots, the new tokens' included.
        prompt: the base's full causal attention over the new tokens alone,
            ``() -> [B, Hq, Q, Dv]``.
        sink_logits: ``[Hq]`` attention sink logits, or None.
        positions: ``[B, Q]`` integers, RoPE positions of the queries; None if not passed.
        indices: ``[B, Hkv or 1, Q, K]`` tokens that the model's own indexer names for the queries,
            by KV head or for all; None where it has none.
        heads: of the layer.
        is_causal: whether a new token sees exactly the valid tokens before it. For some masks it
            builds the whole mask.
    """

    scoring: Scoring
    prompt: Callable[[], torch.Tensor]
    sink_logits: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    is_causal: Callable[[], bool] = lambda: True
    indices: torch.Tensor | None = None
    heads: Heads = Heads()
