"""CentroidQueue: the centroids that count, first in, first out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch

from hf_kvret.methods.ctkvr.lists import CentroidLists

_GENERATIONS = ("base", "fresh")
# Lists unpacked at once.
_PIECE = 64


class CentroidQueue:
    """At most ``room`` centroids in two generations.

    The base is never written to, so that forks share it; new centroids join the fresh ones. The
    oldest are dropped by counting them. When all of the base is dropped, the fresh become it.

    Attributes:
        room: centroids that count; beyond it each new one drops the oldest.
        dropped: centroids of the base that no longer count.
    """

    def __init__(self, room: int, width: int) -> None:
        """``width``: slots of a list."""
        self.room, self.dropped = room, 0
        self._base, self._fresh = CentroidLists(width), CentroidLists(width)

    def __len__(self) -> int:
        return len(self._base) + len(self._fresh) - self.dropped

    @property
    def width(self) -> int:
        """Slots of a list."""
        return self._base.width

    @property
    def heads(self) -> int:
        """KV heads."""
        return self._base.queries.shape[1]

    def push(
        self, queries: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, tokens: int
    ) -> None:
        """Add centroids ``[B, H, m, G, D]`` of ``slots [B, m]`` with ``ids [B, H, m, <= width]``.

        All ids are below ``tokens``.
        """
        target = self._fresh if len(self._base) else self._base
        for lists in (self._base, self._fresh):
            lists.widen(tokens)
        target.append(queries, slots, ids, tokens)
        self.dropped += max(0, len(self) - self.room)
        if self.dropped >= len(self._base):
            self.dropped -= len(self._base)
            self._base, self._fresh = self._fresh, CentroidLists(self.width)

    def live(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries ``[B, H, m, G, D]`` of all that count, and their slots ``[B, m]``."""
        queries, slots = (
            self._base.queries[:, :, self.dropped :],
            self._base.slots[:, self.dropped :],
        )
        if len(self._fresh):
            queries = torch.cat([queries, self._fresh.queries], dim=2)
            slots = torch.cat([slots, self._fresh.slots], dim=1)
        return queries, slots

    def pieces(self) -> Iterator[torch.Tensor]:
        """All lists that count, ``[B, H, *, width]`` int32."""
        for lists, first in ((self._base, self.dropped), (self._fresh, 0)):
            for start in range(first, len(lists), _PIECE):
                yield lists.some_ids(slice(start, start + _PIECE))

    def recall(self, query: torch.Tensor, probes: int) -> torch.Tensor:
        """``[B, H, Q, c, width]`` int32: lists of the ``probes`` centroids nearest to a query.

        The nearest first; -1 for lists that there are not. ``query [B, H, Q, G, D]``.
        """
        older = len(self._base)
        scores = self._base.similarity(query, self.dropped)
        if len(self._fresh):
            scores = torch.cat([scores, self._fresh.similarity(query)], dim=-1)
        best = scores.topk(min(probes, scores.shape[-1]), dim=-1)
        index = best.indices
        found = self._base.take(index.clamp(max=older - 1))
        if len(self._fresh):
            newer = self._fresh.take((index - older).clamp(min=0))
            found = torch.where((index >= older).unsqueeze(-1), newer, found)
        return found.masked_fill((best.values == float("-inf")).unsqueeze(-1), -1)

    def crop(self, cold_len: int) -> None:
        """Strike all slots from ``cold_len`` on off the lists."""
        for lists in (self._base, self._fresh):
            if len(lists):
                ids = lists.ids
                lists.replace_ids(ids.masked_fill(ids >= cold_len, -1))

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        self._base.reorder(rows)
        self._fresh.reorder(rows)

    def fork(self) -> Self:
        """A copy that shares what there is."""
        twin = type(self)(self.room, self.width)
        twin.dropped = self.dropped
        twin._base, twin._fresh = self._base.fork(), self._fresh.fork()
        return twin

    def nbytes(self) -> int:
        """Bytes of all tensors, dropped centroids and spare room included."""
        return self._base.nbytes() + self._fresh.nbytes()

    def recall_nbytes(self, probes: int) -> int:
        """Bytes that one recall of one query reads: all centroids, and the lists of some."""
        rows = len(self._base.queries) * self.heads
        lists = rows * min(probes, len(self)) * self._base.list_nbytes()
        return self._base.queries[:, :, :1].nbytes * len(self) + lists

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that restore it."""
        counts = {"counts": torch.tensor([self.room, self.dropped])}
        parts = zip(_GENERATIONS, (self._base, self._fresh), strict=True)
        return counts | {
            f"{part}.{name}": x for part, lists in parts for name, x in lists.state_dict().items()
        }

    @classmethod
    def from_state(cls, state: dict[str, torch.Tensor]) -> Self:
        """The queue whose ``state_dict`` this is. KeyError names a missing tensor."""
        room, dropped = state["counts"].tolist()
        queue = cls(room, state["base.low"].shape[-1])
        queue.dropped = dropped
        for part, lists in zip(_GENERATIONS, (queue._base, queue._fresh), strict=True):
            mine = {
                name.removeprefix(f"{part}."): x
                for name, x in state.items()
                if name.startswith(f"{part}.")
            }
            if mine:
                lists.load_state_dict(mine)
        return queue
