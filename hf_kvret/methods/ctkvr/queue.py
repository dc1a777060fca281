"""CentroidQueue: the live centroids, first in, first out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from hf_kvret.contracts.schema import Form, damaged
from hf_kvret.contracts.state import State, number, part
from hf_kvret.contracts.token_buffer import MOST_SLOT
from hf_kvret.methods.ctkvr.inverted_lists import InvertedLists
from hf_kvret_kernels.host_step import ListSearch


class CentroidQueue(State):
    """At most ``room`` centroids in two generations.

    The base is never written to, so that forks share it; new centroids are added to the fresh
    generation. The oldest are dropped by a counter. When all of the base is dropped, the fresh
    generation becomes the base.

    Attributes:
        room: most live centroids; beyond it each new one drops the oldest.
        drop_count: number of dropped centroids of the base.
    """

    room: int = number(0, key="counts", least=1, most=MOST_SLOT)
    drop_count: int = number(0, key="counts", least=0, most=MOST_SLOT)
    _base: InvertedLists = part()
    _fresh: InvertedLists = part(may_be_empty=True)

    def __init__(self, room: int, width: int) -> None:
        """``width``: slots of a list."""
        self.room = room
        self._base, self._fresh = InvertedLists(width), InvertedLists(width)

    def __len__(self) -> int:
        return len(self._base) + len(self._fresh) - self.drop_count

    @property
    def width(self) -> int:
        """Slots of a list."""
        return self._base.width

    @property
    def heads(self) -> int:
        """KV heads."""
        return self._base.queries.shape[1]

    @property
    def some(self) -> int:
        """How many lists are unpacked at once."""
        return self._base.some(self.width)

    def push(
        self,
        queries: torch.Tensor,
        slots: torch.Tensor,
        parts: Iterable[torch.Tensor],
        tokens: int,
    ) -> None:
        """Add centroids ``[B, H, m, G, D]`` of ``slots [B, m]``; arguments as of the lists.

        ``parts`` may read this queue.
        """
        target = self._fresh if len(self._base) else self._base
        for lists in (self._base, self._fresh):
            lists.widen(tokens)
        target.append(queries, slots, parts, tokens)
        self.drop_count += max(0, len(self) - self.room)
        if self.drop_count >= len(self._base):
            self.drop_count -= len(self._base)
            self._base, self._fresh = self._fresh, InvertedLists(self.width)

    def generations(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries ``[B, H, m, G, D]`` and slots ``[B, m]`` of those that count, as views."""
        result = [
            (self._base.queries[:, :, self.drop_count :], self._base.slots[:, self.drop_count :])
        ]
        return [*result, (self._fresh.queries, self._fresh.slots)] if len(self._fresh) else result

    def live(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries ``[B, H, m, G, D]`` of all that count, and their slots ``[B, m]``."""
        return joined(self.generations())

    def pieces(self) -> Iterator[torch.Tensor]:
        """All lists that count, ``[B, H, *, width]`` int32."""
        yield from self._base.pieces(self.drop_count)
        yield from self._fresh.pieces()

    def lists_of(self, index: torch.Tensor) -> torch.Tensor:
        """``[B, H, c, width]`` int32: for each row those of ``index [B, c]``, among all that count.

        -1 where there is no such centroid.
        """
        absent = (index < 0) | (index >= len(self))
        places = (index.masked_fill(absent, 0) + self.drop_count)[:, None, None]
        lists = self._take(places.expand(-1, self.heads, -1, -1).contiguous())[:, :, 0]
        return lists.masked_fill_(absent[:, None, :, None], -1)

    def recall(self, query: torch.Tensor, nprobe: int) -> torch.Tensor:
        """``[B, H, Q, c, width]`` int32: lists of the ``nprobe`` centroids nearest to a query.

        The nearest first; -1 for lists that there are not. ``query [B, H, Q, G, D]``.
        """
        scores = self._base.similarity(query, self.drop_count)
        if len(self._fresh):
            scores = torch.cat([scores, self._fresh.similarity(query)], dim=-1)
        best = scores.topk(min(nprobe, scores.shape[-1]), dim=-1)
        lists = self._take(best.indices)
        return lists.masked_fill((best.values == float("-inf")).unsqueeze(-1), -1)

    def host_search(self, query: torch.Tensor, nprobe: int, pending: int) -> ListSearch | None:
        """``recall`` and what follows it, for the CPU library; None for ``query`` of another dtype.

        ``pending``: newest tokens to be recalled with the lists.
        """
        if query.dtype != self._base.queries.dtype:
            return None
        generations = [self._base.generation(self.drop_count)]
        if len(self._fresh):
            generations.append(self._fresh.generation())
        return ListSearch(tuple(generations), nprobe, pending)

    def recall_nbytes(self, nprobe: int) -> int:
        """Bytes that one recall of one query reads: all centroids, and the lists of some."""
        rows = len(self._base.queries) * self.heads
        lists = rows * min(nprobe, len(self)) * self._base.list_nbytes()
        return self._base.queries[:, :, :1].nbytes * len(self) + lists

    def loaded(self) -> None:
        self._fresh.width = self._base.width

    def check_loaded(self, form: Form) -> None:
        """ValueError for two generations that do not go on, or more dropped than there are."""
        super().check_loaded(form)
        if not self.drop_count < len(self._base):
            raise damaged(f"lists: {self.drop_count} of {len(self._base)} centroids are dropped")
        if len(self._fresh) and self._fresh.generation_form != self._base.generation_form:
            raise damaged("lists.fresh are of another form than lists.base")

    def _take(self, index: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, c, width]`` int32 lists of ``index [B, H, Q, c]``; dropped ones count too."""
        older = len(self._base)
        lists = self._base.take(index.clamp(max=older - 1))
        if len(self._fresh):
            newer = self._fresh.take((index - older).clamp(min=0))
            lists = torch.where((index >= older).unsqueeze(-1), newer, lists)
        return lists


def joined(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries ``[B, H, m, G, D]`` and slots ``[B, m]`` of all ``parts`` in one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([one[0] for one in parts], dim=2), torch.cat([one[1] for one in parts], dim=1)
