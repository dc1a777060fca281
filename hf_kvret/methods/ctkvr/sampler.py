"""CentroidSampler: a sample of the queries, which may become centroids."""

from __future__ import annotations

from functools import partial

import torch

from hf_kvret.contracts.state import State, number, part, tensor

_BITS = 30


class CentroidSampler(State):
    """The best valid queries of each sequence, by a rank independent of other queries.

    So they can be chosen while a prompt of unknown length is read, and padding takes no room.

    Args:
        spread: the best are spread evenly over all; else they are the last ones.
    """

    # [B, Hq, m, D]; slot and rank [B, m] int64, -1 where a sequence has fewer.
    _queries: torch.Tensor | None = tensor(shared=True, dims="B Q m D")
    _slots: torch.Tensor | None = tensor(shared=True, dims="B m", dtype=torch.int64)
    _ranks: torch.Tensor | None = tensor(shared=True, dims="B m", dtype=torch.int64)
    _count: int = number(0, key="seen")

    def __init__(self, *, spread: bool = False) -> None:
        self.spread = spread

    def add(self, queries: torch.Tensor, start: int, valid: torch.Tensor | None, most: int) -> None:
        """Take in ``queries [B, Hq, q, D]`` of slots ``start ..``, and keep the best ``most``.

        ``valid [B, q]``; None: all are.
        """
        batch, _, count, _ = queries.shape
        arrivals = torch.arange(self._count, self._count + count, device=queries.device)
        ranks = self._rank(arrivals).expand(batch, count)
        slots = (arrivals - self._count + start).expand(batch, count)
        self._count += count
        if valid is not None:
            ranks, slots = ranks.masked_fill(~valid, -1), slots.masked_fill(~valid, -1)
        # Select among the new ones first: a copy of all queries of a long prompt would be large.
        queries, slots, ranks = _best(queries, slots, ranks, most)
        if self._queries is not None and self._slots is not None and self._ranks is not None:
            # A pass that starts at an earlier slot follows a crop.
            mask = self._slots >= start
            queries = torch.cat([self._queries, queries], dim=2)
            slots = torch.cat([self._slots.masked_fill(mask, -1), slots], dim=1)
            ranks = torch.cat([self._ranks.masked_fill(mask, -1), ranks], dim=1)
            queries, slots, ranks = _best(queries, slots, ranks, most)
        self._queries, self._slots, self._ranks = queries, slots, ranks

    def __len__(self) -> int:
        return 0 if self._queries is None else self._queries.shape[2]

    def best(
        self, count: int, before: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """At most ``count`` queries ``[B, Hq, m, D]``, and slots ``[B, m]``, -1 for none.

        Only those of slots below ``before [B, 1]``, where it is given.
        """
        assert self._queries is not None and self._slots is not None and self._ranks is not None
        slots, ranks = self._slots, self._ranks
        if before is not None:
            late = slots >= before
            slots, ranks = slots.masked_fill(late, -1), ranks.masked_fill(late, -1)
        return _best(self._queries, slots, ranks, count)[:2]

    def _rank(self, arrivals: torch.Tensor) -> torch.Tensor:
        """Int64 of at least 0 for the queries that came as number ``arrivals``."""
        if not self.spread:
            return arrivals
        # Bit reversal: each new number halves a gap between earlier ones.
        reverse = torch.zeros_like(arrivals)
        for bit in range(_BITS):
            reverse |= ((arrivals >> bit) & 1) << (_BITS - 1 - bit)
        return (1 << _BITS) - 1 - reverse


def _best(
    queries: torch.Tensor, slots: torch.Tensor, ranks: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``count`` of the highest rank, in the order they came."""
    if queries.shape[2] <= count:
        # Contiguous, as saving needs it; the input may be a view of the model's tensors.
        dense = queries.clone(memory_format=torch.contiguous_format)
        return dense, slots.clone(), ranks.clone()
    indices = ranks.topk(count, dim=1).indices.sort(dim=1).values
    query_indices = indices[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
    return queries.gather(2, query_indices), slots.gather(1, indices), ranks.gather(1, indices)


class MixedSampler(State):
    """The last queries, and as many spread evenly over those before them.

    The last ones are similar to queries of the answer if a prompt ends with a question; the others
    help if generation returns to an earlier topic.
    """

    _last: CentroidSampler = part(CentroidSampler)
    _even: CentroidSampler = part(partial(CentroidSampler, spread=True))

    def __len__(self) -> int:
        return len(self._last)

    def add(self, queries: torch.Tensor, start: int, valid: torch.Tensor | None, most: int) -> None:
        """As ``CentroidSampler.add``; each half keeps ``most``."""
        for half in (self._last, self._even):
            half.add(queries, start, valid, most)

    def best(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``CentroidSampler.best``; no query is in both halves."""
        queries, slots = self._last.best(-(-count // 2))
        # Sequences without valid queries have no first one: then nothing comes before it.
        first = slots.masked_fill(slots < 0, torch.iinfo(slots.dtype).max).amin(1, keepdim=True)
        earlier, earlier_slots = self._even.best(count // 2, before=first)
        return torch.cat([earlier, queries], dim=2), torch.cat([earlier_slots, slots], dim=1)
