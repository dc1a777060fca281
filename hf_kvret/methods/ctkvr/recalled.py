"""Recalled: the tokens that a query's centroids name, and the best of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from hf_kvret.methods.ctkvr.codes import KeyCodes
from hf_kvret.methods.ctkvr.config import CTkvrConfig
from hf_kvret.methods.ctkvr.queue import CentroidQueue
from hf_kvret.recall import group_relevance
from hf_kvret.stores import Store
from hf_kvret_kernels import centroid


@dataclass(frozen=True, eq=False)
class Recalled:
    """Ids ``[B, H, Q, M]`` int32, each at most once and valid, else -1.

    ``places [B, H, Q, M]`` int64 say where a token was named first: round after round through the
    lists, the nearest centroid's first, and each list from its best token on.
    """

    ids: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls,
        queue: CentroidQueue,
        query: torch.Tensor,
        options: CTkvrConfig,
        pending: int,
        valid: torch.Tensor,
    ) -> Self:
        """For ``query [B, H, Q, G, D]``, with the ``pending`` newest tokens as one more list."""
        lists = queue.recall(query, options.probes).transpose(3, 4)
        held = valid.shape[1]
        newest = torch.arange(
            held - 1, held - 1 - pending, -1, dtype=torch.int32, device=query.device
        )
        if options.rerank == "lists" and pending:
            rounds = max(lists.shape[3], pending)
            lists = torch.nn.functional.pad(lists, (0, 0, 0, rounds - lists.shape[3]), value=-1)
            newest = torch.nn.functional.pad(newest, (0, rounds - pending), value=-1)
            newest = newest[:, None].expand(*lists.shape[:3], -1, 1)
            named = torch.cat([lists, newest], dim=4).flatten(3)
        else:
            named = lists.flatten(3)
            named = torch.cat([named, newest.expand(*named.shape[:3], -1)], dim=3)
        return cls(*centroid.unite(named, valid))

    def best_by_keys(
        self,
        store: Store,
        query: torch.Tensor,
        count: int,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """``[B, H, Q, count]`` int32 by exact scores, best first, then -1 (algorithm 2, line 6)."""
        found = []
        # One query after the other: each has keys of its own, which many could not hold at once.
        for ids, one in zip(self.ids.split(1, dim=2), query.split(1, dim=2), strict=True):
            keys = store.gather(ids.contiguous())[0].to(query.device)
            scores = torch.matmul(one.float(), keys.float().transpose(-1, -2)) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            found.append(scores.masked_fill((ids < 0).unsqueeze(3), float("-inf")))
        return self._best_of(torch.cat(found, dim=2), count)

    def best_by_codes(
        self,
        codes: KeyCodes,
        query: torch.Tensor,
        count: int,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """The same by scores that codes estimate."""
        return self._best_of(codes.logits(query, self.ids, scale, softcap), count)

    def best_by_place(self, count: int) -> torch.Tensor:
        """The same by their places in the lists."""
        return self._best(-self.places.float().masked_fill(self.ids < 0, float("inf")), count)

    def _best_of(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        """By ``logits [B, H, Q, G, M]``."""
        scores = logits.transpose(2, 3).flatten(1, 2)
        return self._best(group_relevance(scores, logits.shape[1]), count)

    def _best(self, relevance: torch.Tensor, count: int) -> torch.Tensor:
        best = relevance.topk(min(count, relevance.shape[-1]), dim=-1)
        ids = self.ids.gather(-1, best.indices).masked_fill(best.values == float("-inf"), -1)
        return torch.nn.functional.pad(ids, (0, count - ids.shape[-1]), value=-1)
