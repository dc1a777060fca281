"""Reranks: how recalled tokens are compared with each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import torch

from hf_kvret.core.block import TokenBlock
from hf_kvret.core.index import ColdTokens
from hf_kvret.core.store import best_of, scores_of_gathered
from hf_kvret.methods.ctkvr.recalled import Recalled


class Rerank(ABC):
    """Chooses the best of what a query recalled. One per index.

    Attributes:
        in_turn: whether recalled tokens must be named in turns through the lists.
        reads_keys: whether it reads the recalled keys in the store.
    """

    in_turn: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = False

    @abstractmethod
    def best(
        self, recalled: Recalled, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        """``[B, H, Q, count]`` int32, best first, then -1; ``query [B, Hq, Q, D]``."""

    def observe(self, block: TokenBlock) -> None:  # noqa: B027 - most keep nothing of a token
        """Take in tokens that turned cold."""

    def crop(self, length: int) -> None:  # noqa: B027
        """Keep the first ``length`` tokens."""

    def reorder(self, rows: torch.Tensor) -> None:  # noqa: B027
        """Batch row b becomes the old row ``rows[b]``."""

    def fork(self) -> Self:
        """A copy that shares what there is until it appends."""
        return self

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return 0

    def token_nbytes(self) -> float:
        """Bytes that comparing one token reads outside the store, all heads and batch rows."""
        return 0.0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that restore it; empty for none."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:  # noqa: B027
        """Become what was saved. KeyError names a missing tensor."""


class StoredKeys(Rerank):
    """By exact scores, computed where the store attends (algorithm 2, line 6)."""

    reads_keys = True

    def best(
        self, recalled: Recalled, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        return cold.store.best(query, recalled.ids, count, cold.scale, cold.softcap)


class FetchedKeys(Rerank):
    """By exact scores on the queries' device, to which the recalled keys are fetched."""

    reads_keys = True

    def best(
        self, recalled: Recalled, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        logits = scores_of_gathered(cold.store, query, recalled.ids, cold.scale, cold.softcap)
        return best_of(logits, recalled.ids, count)


class ListPlaces(Rerank):
    """By their places in the lists: nothing is compared (figure 11, without rerank)."""

    in_turn = True

    def best(
        self, recalled: Recalled, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        ids = recalled.ids
        order = torch.arange(0, -ids.shape[-1], -1, dtype=torch.float32, device=ids.device)
        return recalled.top(order.masked_fill(ids < 0, float("-inf")), count)
