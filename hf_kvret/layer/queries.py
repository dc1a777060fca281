"""What an attention call asks of a layer, and how its queries are laid out for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch

from hf_kvret.contracts.index import Scoring


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Arguments of one attention call other than query, key and value.

    Attributes:
        scoring: ``valid [B, T]`` over all slots, the new tokens' included.
        prompt: the base's full causal attention over the new tokens alone,
            ``() -> [B, Hq, Q, Dv]``.
        sink_logits: ``[Hq]`` attention sink logits, or None.
        positions: ``[B, Q]`` integers, RoPE positions of the queries; None if not passed.
        indices: ``[B, Hkv or 1, Q, K]`` tokens that the model's own indexer names for the queries,
            by KV head or for all; None where it has none.
        is_causal: whether a new token sees exactly the valid tokens before it. For some masks it
            builds the whole mask.
    """

    # Whether ``keys_and_values`` makes tensors with memory of their own.
    makes_rows: ClassVar[bool] = False

    scoring: Scoring
    prompt: Callable[[], torch.Tensor]
    sink_logits: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    is_causal: Callable[[], bool] = field(default=lambda: True)
    indices: torch.Tensor | None = None

    def to_rows(self, query: torch.Tensor) -> torch.Tensor:
        """``query [B, Hq, Q, *]`` as rows are compared with it, ``[B, Hq, Q, Dk]``."""
        return query

    def from_rows(self, out: torch.Tensor) -> torch.Tensor:
        """The attention's result of a mean of rows' values ``[B, Hq, Q, Dv]``."""
        return out

    def expands(self, queries: int) -> bool:
        """Whether so many queries attend exactly to ``keys_and_values``, as they are."""
        return False

    def of_rows(self) -> AttentionCall:
        """The same call for queries that went through ``to_rows``."""
        return self

    def keys_and_values(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What queries as they are attend to, of rows ``[B, Hkv, n, D]``."""
        return keys, values

    def row_elements(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Elements of one token's ``keys_and_values``, of all heads; rows are examples."""
        return keys.shape[1] * (keys.shape[3] + values.shape[3])


@dataclass(frozen=True)
class HeadGroups:
    """``count`` groups of ``size`` query heads for each of ``heads`` KV heads.

    A group that selects for itself is like one more query at the same position. So indexes and
    stores serve groups as they serve drafted tokens, and know nothing of them.

    Attributes:
        heads: Hkv.
        query_heads: of a KV head. The last group may have fewer than ``size``; it is filled up with
            heads that it has, again from its first one, whose results are left out.
        size: query heads of a group.
    """

    heads: int
    query_heads: int
    size: int

    @classmethod
    def of(cls, size: int | None, heads: int, query_heads: int) -> Self | None:
        """Groups of ``size`` of the ``query_heads`` of all ``heads``; None where one is enough."""
        own = query_heads // heads
        return None if size is None or size >= own else cls(heads, own, size)

    @property
    def count(self) -> int:
        """Groups of a KV head."""
        return -(-self.query_heads // self.size)

    def fold(self, query: torch.Tensor) -> torch.Tensor:
        """``[B, Hkv * size, Q * count, D]`` of ``query [B, Hq, Q, D]``; groups go before queries.

        Queries of one position, one for each group, lie beside each other.
        """
        batch, _, queries, dim = query.shape
        own = query.view(batch, self.heads, self.query_heads, queries, dim)
        missing = self.count * self.size - self.query_heads
        if missing:
            last = own[:, :, (self.count - 1) * self.size :]
            repeats = -(-missing // last.shape[2])
            own = torch.cat([own, last.repeat(1, 1, repeats, 1, 1)[:, :, :missing]], dim=2)
        apart = own.unflatten(2, (self.count, self.size)).permute(0, 1, 3, 4, 2, 5)
        return apart.reshape(batch, self.heads * self.size, queries * self.count, dim)

    def unfold(self, result: torch.Tensor) -> torch.Tensor:
        """``[B, Hq, Q, *]`` of a result ``[B, Hkv * size, Q * count, *]`` for folded queries."""
        batch, _, folded = result.shape[:3]
        sizes = (batch, self.heads, self.size, folded // self.count, self.count, *result.shape[3:])
        own = result.view(sizes).movedim(4, 2).flatten(2, 3)[:, :, : self.query_heads]
        return own.flatten(1, 2)

    def unfold_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """``[B, Hq, Q, K]`` of ids that were found for folded queries, by KV head or by each."""
        return self.unfold(ids.repeat_interleave(self.heads * self.size // ids.shape[1], dim=1))
