"""Reranks: how recalled tokens are scored."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.contracts.state import State
from hf_kvret.contracts.store import best_of, scores_of_gathered
from hf_kvret.methods.ctkvr.candidates import Candidates


class Rerank(State):
    """Selects the best of a query's recalled tokens. One per index.

    Attributes:
        in_turn: whether recalled tokens must be in round-robin order over the lists.
        reads_keys: whether it reads the recalled keys from the store.
    """

    in_turn: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = False

    @abstractmethod
    def best(
        self, candidates: Candidates, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        """``[B, H, Q, count]`` int32, best first, then -1; ``query [B, Hq, Q, D]``."""

    def add(self, block: TokenBlock) -> None:
        """Add tokens that became cold."""

    def token_nbytes(self) -> float:
        """Bytes that comparing one token reads outside the store, all heads and batch rows."""
        return 0.0


class StoredKeys(Rerank):
    """By exact scores, computed where the store attends (algorithm 2, line 6)."""

    reads_keys = True

    def best(
        self, candidates: Candidates, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        return cold.store.best(query, candidates.ids, count, cold.scale, cold.softcap)


class FetchedKeys(Rerank):
    """By exact scores on the queries' device, to which the recalled keys are fetched."""

    reads_keys = True

    def best(
        self, candidates: Candidates, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        logits = scores_of_gathered(cold.store, query, candidates.ids, cold.scale, cold.softcap)
        return best_of(logits, candidates.ids, count)


class ListPlaces(Rerank):
    """By their places in the lists, without scoring (figure 11, without rerank)."""

    in_turn = True

    def best(
        self, candidates: Candidates, query: torch.Tensor, count: int, cold: ColdTokens
    ) -> torch.Tensor:
        ids = candidates.ids
        order = torch.arange(0, -ids.shape[-1], -1, dtype=torch.float32, device=ids.device)
        return candidates.top(order.masked_fill(ids < 0, float("-inf")), count)
