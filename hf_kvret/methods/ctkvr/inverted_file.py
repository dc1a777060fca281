"""InvertedFile: the centroids of a layer with their lists, and when lists are rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hf_kvret.contracts.index import ColdTokens
from hf_kvret.contracts.state import State, number, part, tensor
from hf_kvret.methods.ctkvr.config import CTkvrConfig
from hf_kvret.methods.ctkvr.inverted_lists import CentroidQueue, joined
from hf_kvret_kernels import centroid

# Keys scored against centroids at once: each chunk is sorted together with the lists. On a CPU
# chunks are smaller, to fit into its cache.
_CHUNK_LEN = 1 << 14
_CHUNK_NUMBERS = 1 << 18

# Lists shorter than this share of their target length are rebuilt.
_SHORT = 0.8


class InvertedFile(State):
    """Makes the lists of centroids, and monitors their coverage.

    Attributes:
        queue: the centroids; None before the first lists.
        listed_len: tokens that the lists were made from; later ones are pending.
        list_builds: how often lists over all keys were made.
        keys_scored: keys that were read for it, over batch and KV heads.
    """

    queue: CentroidQueue | None = part(lambda: CentroidQueue(0, 0), key="", optional=True)
    listed_len: int = number(0, key="listed", least=0, most="N")
    list_builds: int = number(0, saved=False, reset_on_fork=True)
    keys_scored: int = number(0, saved=False, reset_on_fork=True)
    # Share of the tokens in any list, [B] fp32, at the last check.
    _coverage: torch.Tensor | None = tensor(
        key="covered", optional=True, shared=True, dims="B", dtype=torch.float32
    )

    def __init__(self, options: CTkvrConfig) -> None:
        self.options = options

    def start(self, cold: ColdTokens, queries: torch.Tensor, slots: torch.Tensor) -> None:
        """Make the first lists, for centroids ``[B, H, m, G, D]`` of ``slots [B, m]``."""
        self._list_all(cold, queries, slots, causal=self.options.causal)

    def keep_up(
        self, cold: ColdTokens, bundles: list[tuple[torch.Tensor, torch.Tensor]], flushed: bool
    ) -> None:
        """Add centroids; rebuild all lists if too much is pending or they are too short.

        Synchronizes with the device only if there are new centroids, or if tokens became cold just
        before (``flushed``).

        Args:
            bundles: queries ``[B, H, m, G, D]`` with slots ``[B, m]``, for lists over all keys.
        """
        options, queue = self.options, self.queue
        assert queue is not None
        queue.room = max(queue.room, options.centroids_for(len(cold)))
        late = options.pending and len(cold) - self.listed_len > options.pending
        list_len = options.list_len(len(cold), cold.budget)
        if late or queue.width < _SHORT * list_len:
            self._list_all(cold, *joined([*queue.generations(), *bundles]))
            return
        for queries, slots in bundles:
            self._join(cold, queries, slots, queue)
        if flushed and self._coverage is not None:
            self._list_where_coverage_fell(cold, queue)

    def pending(self, cold_len: int) -> int:
        """Number of tokens that every query recalls in addition to the lists."""
        return cold_len - min(cold_len, self.listed_len) if self.options.pending else 0

    def crop(self, length: int) -> None:
        """Remove all slots from ``length`` on from the lists."""
        self.listed_len = min(self.listed_len, length)
        super().crop(length)

    def stats(self) -> dict[str, Any]:
        """Counts, and the coverage at the last check; None if it is not checked."""
        return {
            "centroids": 0 if self.queue is None else len(self.queue),
            "list_builds": self.list_builds,
            "keys_scored": self.keys_scored,
            "coverage": None if self._coverage is None else float(self._coverage.mean()),
        }

    def _list_all(
        self, cold: ColdTokens, queries: torch.Tensor, slots: torch.Tensor, causal: bool = False
    ) -> None:
        """Rebuild the queue with these centroids; then no token is pending."""
        queries, slots = _dead_first(queries, slots)
        width = self.options.list_len(len(cold), cold.budget)
        parts = self._lists(cold, queries, slots, width, causal)
        queue = CentroidQueue(self.options.centroids_for(len(cold)), width)
        queue.push(queries, slots, parts, len(cold))
        self.queue = queue
        self.listed_len = len(cold)
        if self.options.coverage > 0 and self.options.update_lists == "recalled":
            self._coverage = share_listed(self.queue, cold.valid, self.listed_len)

    def _join(
        self, cold: ColdTokens, queries: torch.Tensor, slots: torch.Tensor, queue: CentroidQueue
    ) -> None:
        queries, slots = _dead_first(queries, slots)
        parts = self._lists(cold, queries, slots, queue.width)
        if not bool((slots < 0).any()):
            queue.push(queries, slots, parts, len(cold))
            return
        # Padding of one row must not evict centroids of another: it is evicted first, row by row.
        everyone, places = joined([*queue.generations(), (queries, slots)])
        order = _order(places)
        replacement = CentroidQueue(queue.room, queue.width)
        replacement.push(
            *_dead_first(everyone, places), _in_order(queue, parts, slots, order), len(cold)
        )
        self.queue = replacement

    def _list_where_coverage_fell(self, cold: ColdTokens, queue: CentroidQueue) -> None:
        """Rebuild the lists of batch rows whose coverage is too low."""
        assert self._coverage is not None
        coverage = share_listed(queue, cold.valid, self.listed_len)
        low = coverage < self.options.coverage * self._coverage
        if not bool(low.any()):
            return
        queries, slots = queue.live()
        parts = self._lists(cold, queries, slots, queue.width)
        # The other rows of a batch must not change.
        order = torch.arange(len(queue), device=slots.device).expand(len(slots), -1)
        parts = _either(low[:, None].expand_as(slots), parts, queue, order)
        replacement = CentroidQueue(queue.room, queue.width)
        replacement.push(queries, slots, parts, len(cold))
        self.queue = replacement
        # So that the next rebuild needs an even lower coverage.
        coverage = share_listed(self.queue, cold.valid, self.listed_len)
        self._coverage = torch.where(low, coverage, self._coverage)

    def _lists(
        self,
        cold: ColdTokens,
        queries: torch.Tensor,
        slots: torch.Tensor,
        width: int,
        causal: bool = False,
    ) -> Iterator[torch.Tensor]:
        self.list_builds += 1
        self.keys_scored += len(queries) * queries.shape[1] * len(cold)
        return best_keys(cold, queries, slots, width, causal=causal)


def _order(slots: torch.Tensor) -> torch.Tensor:
    """``[B, m]`` int64: places in ``slots [B, m]``, row by row those of -1 first."""
    return (slots >= 0).int().argsort(dim=1, stable=True)


def _dead_first(x: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [B, H, m, ...]`` and ``slots [B, m]`` in that order: themselves where none is -1."""
    if not bool((slots < 0).any()):
        return x, slots
    order = _order(slots)
    rows = torch.arange(len(order), device=order.device)[:, None]
    return x.transpose(1, 2)[rows, order].transpose(1, 2), slots.gather(1, order)


def _in_order(
    queue: CentroidQueue, parts: Iterable[torch.Tensor], slots: torch.Tensor, order: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Lists of ``queue`` and, after them, new ones, all in the ``order [B, m]`` of both.

    ``parts`` are the new ones; those with ``slots [B, m]`` of at least 0 stay last, where they are.
    """
    for index in order[:, : len(queue)].split(queue.some, dim=1):
        yield queue.lists_of(index)
    yield from _either(slots >= 0, parts, queue, order[:, len(queue) :])


def _either(
    mask: torch.Tensor, parts: Iterable[torch.Tensor], queue: CentroidQueue, order: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Lists of ``parts`` where ``mask [B, m]``, else those of ``queue`` at ``order [B, m]``."""
    start = 0
    for lists in parts:
        for chunk in lists.split(queue.some, dim=2):
            some = slice(start, start + chunk.shape[2])
            yield torch.where(mask[:, None, some, None], chunk, queue.lists_of(order[:, some]))
            start = some.stop


def best_keys(
    cold: ColdTokens, queries: torch.Tensor, slots: torch.Tensor, width: int, *, causal: bool
) -> Iterator[torch.Tensor]:
    """Lists ``[B, H, *, width]`` int32, of some centroids after the others: their best keys.

    Best first, then -1. ``queries [B, H, m, G, D]``; ``slots [B, m]``, -1 for padding, whose list
    is empty. ``causal`` leaves out keys after the centroid. Reads all keys; on a CPU once per group
    of lists of some MiB (see ``centroid.key_lists``).
    """
    batch, heads, count, _, dim = queries.shape
    chunk_len = _CHUNK_LEN
    if queries.device.type == "cpu":
        chunk_len = max(1, _CHUNK_NUMBERS // (batch * heads * dim))

    def chunks() -> Iterator[tuple[int, torch.Tensor]]:
        for start, keys in cold.store.key_chunks(chunk_len):
            yield start, keys.to(queries.device)
            # Freed before the next one is made.
            del keys

    start = 0
    for ids in centroid.key_lists(
        queries,
        chunks,
        width,
        valid=cold.valid,
        scale=cold.scale,
        softcap=cold.softcap,
        positions=slots if causal else None,
    ):
        dead = slots[:, start : start + ids.shape[2]] < 0
        start += ids.shape[2]
        yield ids.masked_fill_(dead[:, None, :, None], -1)
    assert start == count, "there is a list for each centroid"


def share_listed(queue: CentroidQueue, valid: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[B]`` fp32: share of the first ``tokens`` valid tokens in any list, mean over heads.

    ``valid [B, n]``; 0 for a row without valid tokens.
    """
    count = min(tokens, valid.shape[1])
    marks = torch.zeros(len(valid), queue.heads, count + 1, dtype=torch.bool, device=valid.device)
    for ids in queue.chunks():
        flat = ids.flatten(2).long()
        marks.scatter_(2, flat.masked_fill((flat < 0) | (flat >= count), count), True)
    token_mask = valid[:, None, :count]
    share_sum = (marks[..., :count] & token_mask).sum(-1).float().mean(1)
    return share_sum / token_mask.sum(-1)[:, 0].clamp(min=1)
