"""FlatIndex: scores every cold key exactly and takes the best."""

from __future__ import annotations

import torch

from hf_kvret.core.block import TokenBlock
from hf_kvret.core.index import Index
from hf_kvret.core.recall import exact_scores
from hf_kvret.core.relevance import group_relevance
from hf_kvret.core.token_buffer import TokenBuffer, tokens


class FlatIndex(Index):
    """Keeps a copy of the keys on the device. One selection serves a KV head's query heads.

    The relevance of a token is the largest of the softmax weights that the query heads of the
    group give it; ties go to either.
    """

    _keys: TokenBuffer = tokens()

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

    def select_nbytes(self) -> int:
        return self._keys.rows.nbytes
