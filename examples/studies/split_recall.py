"""Recall of the exact top-k, told apart by whether a token stood in the prompt.

For study only: it reads all keys for every selection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch

from hf_kvret.index import ColdTokens
from hf_kvret.methods.ctkvr import CTkvrCache, CTkvrConfig, CTkvrIndex
from hf_kvret.recall import exact_scores
from hf_kvret.relevance import group_relevance


@dataclass
class SplitCounts:
    """Tokens of exact top-k sets, summed over selections, batch, heads and queries.

    Attributes:
        prompt, generated: that there were, by where they stood.
        prompt_found, generated_found: that were selected.
    """

    prompt: int = 0
    generated: int = 0
    prompt_found: int = 0
    generated_found: int = 0

    @classmethod
    def total(cls, counts: Iterable[SplitCounts]) -> Self:
        """The sums over ``counts``."""
        found = cls()
        for one in counts:
            for name, value in vars(one).items():
                setattr(found, name, getattr(found, name) + value)
        return found

    def shares(self) -> dict[str, float | None]:
        """``prompt_recall`` and ``generated_recall``, None where there was no such token.

        And ``generated_share``: of all exact top-k tokens, those that were generated.
        """
        both = self.prompt + self.generated
        return {
            "prompt_recall": self.prompt_found / self.prompt if self.prompt else None,
            "generated_recall": self.generated_found / self.generated if self.generated else None,
            "generated_share": self.generated / both if both else None,
        }


class SplitIndex(CTkvrIndex):
    """Counts what is selected; it answers as any other.

    The first pass is the prompt, so read it in one.

    Attributes:
        prompt_len: slots of the first pass; 0 before it.
        counts: since the index was made or forked.
    """

    def __init__(self, options: CTkvrConfig) -> None:
        super().__init__(options)
        self.prompt_len = 0
        self.counts = SplitCounts()

    def watch(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        if start == 0:
            self.prompt_len = queries.shape[2]
        super().watch(queries, keys, start, valid, positions)

    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        ids = super().select(query, budget, valid, scale, softcap)
        assert self._cold is not None
        found = split_counts(query, ids, self._cold, self.prompt_len)
        self.counts = SplitCounts.total((self.counts, found))
        return ids

    def fork(self) -> Self:
        twin = super().fork()
        twin.prompt_len = self.prompt_len
        return twin

    def state_dict(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError("caches of a study are not saved")


class SplitCTkvrCache(CTkvrCache):
    """CTkvrCache that tells recall of the prompt and of the generation apart."""

    @classmethod
    def make_index(cls, options: CTkvrConfig, layer: int) -> SplitIndex:
        """A new, empty index; the same for every layer."""
        return SplitIndex(options)

    def split_shares(self) -> dict[str, float | None]:
        """``SplitCounts.shares`` over all layers, since the cache was made or forked."""
        indexes = [layer.regions.index for layer in self.retrieval_layers if layer.regions]
        return SplitCounts.total(
            index.counts for index in indexes if isinstance(index, SplitIndex)
        ).shares()


def split_counts(
    query: torch.Tensor, ids: torch.Tensor, cold: ColdTokens, prompt_len: int
) -> SplitCounts:
    """Compare ``ids [B, H, Q, k]`` with the exact top-k, as ``measure_recall`` does.

    Tokens from slot ``prompt_len`` on were generated. Reads every key of the store.
    """
    pieces = [
        exact_scores(query, keys, cold.scale, cold.softcap) for _, keys, _ in cold.store.chunks()
    ]
    scores = torch.cat(pieces, dim=-1).masked_fill(~cold.valid[:, None, None], float("-inf"))
    relevance = group_relevance(scores, ids.shape[1])
    held = relevance.shape[-1]
    values, best = relevance.topk(min(ids.shape[-1], held), dim=-1)
    counted = values > float("-inf")
    marks = torch.zeros(*relevance.shape[:-1], held + 1, dtype=torch.bool, device=ids.device)
    marks.scatter_(-1, ids.long().masked_fill(ids < 0, held), True)
    found = marks.gather(-1, best) & counted
    generated = best >= prompt_len
    sums = (counted & ~generated, counted & generated, found & ~generated, found & generated)
    return SplitCounts(*torch.stack([one.sum() for one in sums]).tolist())
