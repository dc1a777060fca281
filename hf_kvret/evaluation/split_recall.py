"""Recall of the exact top-k, told apart by whether a token stood in the prompt.

An index inside another one: the outer answers as the inner does, and counts what was selected. For
study only: it reads all keys for every selection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from hf_kvret.block import TokenBlock
from hf_kvret.cache import RetrievalCache
from hf_kvret.config import RetrievalConfig
from hf_kvret.index import ColdTokens, Index
from hf_kvret.methods.ctkvr import CTkvrCache
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


class SplitIndex(Index):
    """Answers as ``inner`` does, and counts for study.

    The first pass is the prompt, so read it in one.

    Attributes:
        inner: the index that selects.
        prompt_len: slots of the first pass; 0 before it.
        counts: since the index was made or forked.
    """

    def __init__(self, inner: Index) -> None:
        self.inner = inner
        self.prompt_len = 0
        self.counts = SplitCounts()
        self._cold: ColdTokens | None = None

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
        self.inner.watch(queries, keys, start, valid, positions)

    def observe(self, block: TokenBlock) -> None:
        self.inner.observe(block)

    def build(self, cold: ColdTokens) -> None:
        self._cold = cold
        self.inner.build(cold)

    def refresh(self, cold: ColdTokens) -> None:
        self._cold = cold
        self.inner.refresh(cold)

    def extend(self, block: TokenBlock) -> None:
        self.inner.extend(block)

    def select(
        self,
        query: torch.Tensor,
        budget: int,
        valid: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        ids = self.inner.select(query, budget, valid, scale, softcap)
        assert self._cold is not None
        self.counts = SplitCounts.total(
            (self.counts, split_counts(query, ids, self._cold, self.prompt_len))
        )
        return ids

    def learn(self) -> None:
        self.inner.learn()

    def candidates(self, cold_len: int, budget: int) -> int:
        return self.inner.candidates(cold_len, budget)

    def reorder(self, rows: torch.Tensor) -> None:
        self.inner.reorder(rows)

    def crop(self, cold_len: int) -> None:
        self.inner.crop(cold_len)

    def fork(self) -> Self:
        twin = type(self)(self.inner.fork())
        twin.prompt_len = self.prompt_len
        return twin

    def set_options(self, options: Any) -> None:
        self.inner.set_options(options)

    def nbytes(self) -> int:
        return self.inner.nbytes()

    def select_nbytes(self) -> int:
        return self.inner.select_nbytes()

    def stats(self) -> dict[str, Any]:
        return self.inner.stats()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**self.inner.state_dict(), "split.prompt_len": torch.tensor(self.prompt_len)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        rest = dict(state)
        self.prompt_len = int(rest.pop("split.prompt_len"))
        self.inner.load_state_dict(rest)


class SplitCTkvrCache(RetrievalCache):
    """CTkvrCache with a ``SplitIndex`` around each index."""

    name: ClassVar[str] = CTkvrCache.name
    config_class: ClassVar[type[RetrievalConfig]] = CTkvrCache.config_class

    @classmethod
    def make_index(cls, options: Any, layer: int) -> SplitIndex:
        """A new, empty index."""
        return SplitIndex(CTkvrCache.make_index(options, layer))

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
