"""Candidates: the tokens in the lists of a query's nearest centroids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.functional import pad

from hf_kvret.methods.ctkvr.queue import CentroidQueue
from hf_kvret_kernels import centroid


@dataclass(frozen=True, eq=False)
class Candidates:
    """Ids ``[B, H, Q, M]`` int32, each valid id once, at its first occurrence; else -1."""

    ids: torch.Tensor

    @classmethod
    def of(
        cls,
        queue: CentroidQueue,
        query: torch.Tensor,
        nprobe: int,
        pending: int,
        valid: torch.Tensor,
        *,
        in_turn: bool = False,
    ) -> Self:
        """For ``query [B, H, Q, G, D]``, with the ``pending`` newest tokens as one more list.

        List after list, the nearest centroid's first; with ``in_turn`` round-robin, the best token
        of each list first.
        """
        lists = queue.recall(query, nprobe)
        length = valid.shape[1]
        newest = torch.arange(
            length - 1, length - 1 - pending, -1, dtype=torch.int32, device=query.device
        )
        if in_turn:
            width = max(lists.shape[-1], pending)
            lists = pad(lists, (0, width - lists.shape[-1]), value=-1)
            last = pad(newest, (0, width - pending), value=-1).expand(*lists.shape[:3], 1, width)
            ids = torch.cat([lists, last], dim=3).transpose(3, 4).flatten(3)
        else:
            ids = torch.cat([lists.flatten(3), newest.expand(*lists.shape[:3], -1)], dim=3)
        return cls(centroid.unite(ids, valid))

    def top(self, relevance: torch.Tensor, count: int) -> torch.Tensor:
        """``[B, H, Q, count]`` int32 ids of the highest ``relevance [B, H, Q, M]``, then -1."""
        best = relevance.topk(min(count, relevance.shape[-1]), dim=-1)
        ids = self.ids.gather(-1, best.indices).masked_fill(best.values == float("-inf"), -1)
        return pad(ids, (0, count - ids.shape[-1]), value=-1)
