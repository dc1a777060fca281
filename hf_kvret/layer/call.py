"""AttentionCall: the arguments of an attention call other than query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_kvret.contracts.scoring import Scoring


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Arguments of one attention call other than query, key and value.

    Attributes:
        scoring: ``valid [B, T]`` over all slots, the new tokens' included.
        prompt: the base's full causal attention over the new tokens alone,
            ``() -> [B, Hq, Q, Dv]``.
        sink_logits: ``[Hq]`` learned attention sinks, or None.
        positions: ``[B, Q]`` integers, RoPE positions of the new tokens; None if not passed.
    """

    # Whether ``keys_and_values`` are made anew, of memory of their own.
    makes_rows: ClassVar[bool] = False

    scoring: Scoring
    prompt: Callable[[], torch.Tensor]
    sink_logits: torch.Tensor | None = None
    positions: torch.Tensor | None = None

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

    def row_numbers(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Numbers of one token's ``keys_and_values``, of all heads; of any rows like its own."""
        return keys.shape[1] * (keys.shape[3] + values.shape[3])
