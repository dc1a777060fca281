"""Windowed RoPE without codebooks: what A2ATS would select if its codewords lost nothing.

For study only: the index holds all keys once more, and every selection reads them.
"""

from __future__ import annotations

import torch

from hf_kvret.methods.a2ats import A2ATSCache, A2ATSConfig, A2ATSIndex
from hf_kvret.recall import exact_scores
from hf_kvret.relevance import group_relevance
from hf_kvret_kernels import proxy


class ExactKeysIndex(A2ATSIndex):
    """Scores each token with its key in the space of the artifact, instead of its codeword."""

    def watch(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        self._codes.crop(start)
        assert self._codes.length == start, "passes come in order"
        self._codes.append(self._on(keys.device).space.keys(keys, positions))
        self._positions = positions

    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        keys = self._codes.rows[:, :, : valid.shape[1]]
        seen = self._on(query.device).space.queries(query, self._positions)
        scores = exact_scores(seen, keys, scale, softcap)
        scores = scores.masked_fill(~valid[:, None, None], float("-inf"))
        return proxy.top_k(group_relevance(scores, keys.shape[1]), budget)


class ExactKeysCache(A2ATSCache):
    """``A2ATSCache`` with exact keys; KV heads choose. Of its artifact only the space counts."""

    @classmethod
    def make_index(cls, options: A2ATSConfig, layer: int) -> ExactKeysIndex:
        """A new, empty index for the model layer number ``layer``."""
        return ExactKeysIndex(options, layer)
