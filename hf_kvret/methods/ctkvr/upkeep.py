"""Lists over all keys, and how much of the cold tokens lists cover."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_kvret.methods.ctkvr.queue import CentroidQueue
from hf_kvret.stores import Store
from hf_kvret_kernels import centroid


@dataclass(frozen=True, eq=False)
class ColdKeys:
    """All cold keys of a layer, and how queries are compared with them.

    Attributes:
        store: read once or twice in pieces for lists.
        valid: ``[B, n]`` bool, of all tokens in the store.
        scale: factor of the dot products.
        softcap: as in ``Index.select``.
    """

    store: Store
    valid: torch.Tensor
    scale: float
    softcap: float | None

    @property
    def held(self) -> int:
        """Tokens in the store."""
        return self.valid.shape[1]

    def lists(
        self, queries: torch.Tensor, slots: torch.Tensor, width: int, *, causal: bool
    ) -> torch.Tensor:
        """``[B, H, m, width]`` int32: the best keys for each centroid, best first, then -1.

        ``queries [B, H, m, G, D]``; ``slots [B, m]``, -1 for what is no centroid: its list is
        empty. ``causal`` leaves out keys after the centroid.
        """

        def pieces() -> Iterator[tuple[int, torch.Tensor]]:
            for start, keys, _ in self.store.chunks():
                yield start, keys.to(queries.device)

        ids = centroid.top_keys(
            queries,
            pieces,
            width,
            valid=self.valid,
            scale=self.scale,
            softcap=self.softcap,
            positions=slots if causal else None,
        )
        return ids.masked_fill((slots < 0)[:, None, :, None], -1)


def share_listed(queue: CentroidQueue, valid: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[B]`` fp32: share of the first ``tokens`` valid tokens in any list, mean over heads.

    ``valid [B, n]``; 0 for a row without valid tokens.
    """
    count = min(tokens, valid.shape[1])
    marks = torch.zeros(len(valid), queue.heads, count + 1, dtype=torch.bool, device=valid.device)
    for ids in queue.pieces():
        flat = ids.flatten(2).long()
        marks.scatter_(2, flat.masked_fill((flat < 0) | (flat >= count), count), True)
    counted = valid[:, None, :count]
    found = (marks[..., :count] & counted).sum(-1).float().mean(1)
    return found / counted.sum(-1)[:, 0].clamp(min=1)
