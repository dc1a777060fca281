"""FlatIndex: scores every cold key exactly and takes the best."""

from __future__ import annotations

from typing import Self

import torch

from hf_kvret.core.block import TokenBlock
from hf_kvret.core.index import Index
from hf_kvret.core.recall import exact_scores
from hf_kvret.core.relevance import group_relevance
from hf_kvret.core.token_buffer import GrowingRows


class FlatIndex(Index):
    """Keeps a copy of the keys on the device. One selection serves a KV head's query heads.

    The relevance of a token is the largest of the softmax weights that the query heads of the
    group give it; ties go to either.
    """

    def __init__(self) -> None:
        self._keys = GrowingRows()

    def observe(self, block: TokenBlock) -> None:
        self._keys.append(block.keys)

    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        keys = self._keys.rows
        scores = exact_scores(query, keys, scale, softcap)
        scores = scores.masked_fill(~valid[:, None, None], float("-inf"))
        best = group_relevance(scores, keys.shape[1]).topk(budget, dim=-1)
        return best.indices.masked_fill(best.values == float("-inf"), -1).int()

    def uncapturable(self) -> str | None:
        return None

    def candidates(self, cold_len: int, budget: int) -> int:
        return cold_len

    def reorder(self, rows: torch.Tensor) -> None:
        self._keys.reorder(rows)

    def crop(self, cold_len: int) -> None:
        self._keys.crop(cold_len)

    def fork(self) -> Self:
        twin = type(self)()
        twin._keys = self._keys.fork()
        return twin

    def nbytes(self) -> int:
        return self._keys.nbytes()

    def select_nbytes(self) -> int:
        return self._keys.rows.nbytes

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"keys": self._keys.rows.contiguous()} if self._keys.length else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._keys = GrowingRows()
        self._keys.append(state["keys"])
