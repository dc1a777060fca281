"""InvertedFile: the centroids of a layer in order of age, each with a list of its best tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from hf_kvret.contracts.index import ColdTokens
from hf_kvret.contracts.state import State, number, part, tensor
from hf_kvret.contracts.token_buffer import TokenBuffer, tokens
from hf_kvret.methods.ctkvr.config import CTkvrConfig
from hf_kvret_kernels import centroid
from hf_kvret_kernels._dispatch import preferred
from hf_kvret_kernels.host_step import Generation, ListSearch

_NARROW = (1 << 16) - 1
MOST_TOKENS = (1 << 24) - 1
"""Most tokens whose slots fit into three bytes."""
# Ids unpacked at once.
_ELEMENTS = 1 << 18
# Keys scored against centroids at once: each chunk is sorted together with the lists. On a CPU
# chunks are smaller, to fit into its cache.
_CHUNK_LEN = 1 << 14
_CHUNK_ELEMENTS = 1 << 18
# Keys that a metric is made of, and the share of the mean variance added to each.
_SAMPLE, _LEAST_VARIANCE = 4096, 0.1
# Lists shorter than this share of their target length are rebuilt.
_SHORT = 0.8

_small = partial(TokenBuffer, 64)


class Centroids(NamedTuple):
    """Past queries ``[B, H, m, G, D]``, and their ``slots [B, m]``, -1 for padding."""

    queries: torch.Tensor
    slots: torch.Tensor

    def padding_first(self) -> Centroids:
        """Sequence by sequence padding first; themselves where there is none."""
        if not bool((self.slots < 0).any()):
            return self
        order = (self.slots >= 0).int().argsort(dim=1, stable=True)
        sequences = torch.arange(len(order), device=order.device)[:, None]
        queries = self.queries.transpose(1, 2)[sequences, order].transpose(1, 2)
        return Centroids(queries, self.slots.gather(1, order))


def joined(centroids: list[Centroids]) -> Centroids:
    """All ``centroids`` in one."""
    if len(centroids) == 1:
        return centroids[0]
    queries, slots = zip(*centroids, strict=True)
    return Centroids(torch.cat(queries, dim=2), torch.cat(slots, dim=1))


class InvertedLists(State):
    """Centroids with a list ``[B, H, m, rho]`` of slots each.

    A slot is stored plus 1, so that 0 is none: the low 16 bits, and 8 more bits once slots need
    them. So a slot takes 2 bytes up to 65,535 tokens, 3 above.

    Attributes:
        width: slots of a list, rho.
    """

    # A row is a centroid.
    _queries: TokenBuffer = tokens(_small, dims="B H m g D")
    _inverse: TokenBuffer = tokens(_small, dims="B H m g", dtype=torch.float32)
    _slots: TokenBuffer = tokens(_small, dims="B 1 m", dtype=torch.int64)
    _low: TokenBuffer = tokens(_small, dims="B H m w", dtype=torch.int16)
    _high: TokenBuffer = tokens(_small, may_be_empty=True, dims="B H m w", dtype=torch.uint8)

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return len(self._queries)

    @property
    def queries(self) -> torch.Tensor:
        """View ``[B, H, m, G, D]``."""
        return self._queries.rows

    @property
    def slots(self) -> torch.Tensor:
        """View ``[B, m]`` int64: slots of the queries, -1 for padding."""
        return self._slots.rows[:, 0]

    def ids_of(self, span: slice) -> torch.Tensor:
        """``[B, H, *, rho]`` int32: the lists of the centroids in ``span``."""
        ids = self._low.rows[:, :, span].int().bitwise_and_(0xFFFF)
        if len(self._high):
            ids |= self._high.rows[:, :, span].int().bitwise_left_shift_(16)
        return ids.sub_(1)

    def append(
        self,
        new: Centroids,
        chunks: Iterable[torch.Tensor],
        tokens: int,
        metric: torch.Tensor | None = None,
    ) -> None:
        """Add ``new`` centroids with lists; their lengths are in ``metric [B, H, D, D]``.

        ``chunks`` are their lists ``[B, H, *, <= rho]`` int32 in order, each packed before the next
        one is asked for. All ids are below ``tokens``.
        """
        queries = new.queries
        self.widen(tokens)
        self._pack(chunks, queries, len(self._high) > 0 or tokens > _NARROW)
        self._queries.append(queries)
        self._slots.append(new.slots[:, None])
        self._inverse.append(centroid.units(queries, metric)[1])

    def widen(self, tokens: int) -> None:
        """Make room for slots below ``tokens``."""
        assert tokens <= MOST_TOKENS, "the index refuses more"
        if tokens > _NARROW and len(self) and not len(self._high):
            zeros = torch.zeros_like(self._low.rows, dtype=torch.uint8)
            self._high.append(zeros)

    def similarity(self, units: torch.Tensor, largest: bool, drop_count: int = 0) -> torch.Tensor:
        """``[B, H, Q, m]`` fp32 of ``units [B, H, Q, G, D]`` of a query.

        -inf for the oldest ``drop_count``.
        """
        result = centroid.similarity(units, self.queries, self._inverse.rows, largest=largest)
        mask = (self.slots < 0)[:, None, None]
        if drop_count:
            mask = mask | (torch.arange(len(self), device=units.device) < drop_count)
        return result.masked_fill(mask, float("-inf"))

    def take(self, index: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, c, rho]`` int32 lists of the centroids ``index [B, H, Q, c]``."""
        high = self._high.rows if len(self._high) else None
        return centroid.take_lists(self._low.rows, high, index)

    def generation(self, first: int = 0) -> Generation:
        """Views of the centroids from ``first`` on, for the CPU library."""
        buffers = self._queries, self._inverse, self._low
        queries, inverse, low = (buffer.rows[:, :, first:] for buffer in buffers)
        high = self._high.rows[:, :, first:] if len(self._high) else None
        return Generation(queries, inverse, self.slots[:, first:], low, high)

    def crop(self, length: int) -> None:
        """Remove all slots from ``length`` on from the lists; centroids stay."""
        if not len(self):
            return
        old, (batch, heads) = self.fork(), self.queries.shape[:2]
        step = max(1, _ELEMENTS // max(1, batch * heads * self.width))
        self._low, self._high = _small(), _small()
        lists = (old.ids_of(slice(start, start + step)) for start in range(0, len(old), step))
        kept = (ids.masked_fill_(ids >= length, -1) for ids in lists)
        self._pack(kept, self.queries, len(old._high) > 0)

    def list_nbytes(self) -> int:
        """Bytes of one list of one head and sequence."""
        return self.width * (3 if len(self._high) else 2)

    def loaded(self) -> None:
        self.width = self._low.rows.shape[-1]

    def _pack(self, chunks: Iterable[torch.Tensor], queries: torch.Tensor, wide: bool) -> None:
        """Append the lists ``chunks`` of as many centroids as there are ``queries``."""
        batch, heads, count = queries.shape[:3]
        like = queries.new_empty(batch, heads, 0, self.width, dtype=torch.int16)
        low = self._low.reserve(count, like)
        high = self._high.reserve(count, like.byte()) if wide else None
        start = 0
        for ids in chunks:
            ids = pad(ids + 1, (0, self.width - ids.shape[3]))
            end = start + ids.shape[2]
            if high is not None:
                high[:, :, start:end] = ids >> 16
            # Not by a cast alone: its result out of range depends on the device.
            low[:, :, start:end] = ids.add_(0x8000).bitwise_and_(0xFFFF).sub_(0x8000)
            start = end
        assert start == count, "there is a list for each centroid"


class CentroidQueue(State):
    """At most ``room`` centroids in two generations.

    The base is never written to, so that forks share it; new centroids are added to the fresh
    generation. The oldest are dropped by a counter. When all of the base is dropped, the fresh
    generation becomes the base.

    Attributes:
        room: most live centroids; beyond it each new one drops the oldest.
        drop_count: number of dropped centroids of the base.
        metric: as of ``centroid.units``.
    """

    room: int = number(0, key="counts")
    drop_count: int = number(0, key="counts")
    metric: torch.Tensor | None = tensor(
        optional=True, shared=True, dims="B H D D", dtype=torch.float32
    )
    _base: InvertedLists = part()
    _fresh: InvertedLists = part(may_be_empty=True)

    def __init__(self, room: int, width: int, metric: torch.Tensor | None = None) -> None:
        """``width``: slots of a list."""
        self.room, self.metric = room, metric
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

    def push(self, new: Centroids, chunks: Iterable[torch.Tensor], tokens: int) -> None:
        """Add ``new`` centroids; arguments as of the lists. ``chunks`` may read this queue."""
        target = self._fresh if len(self._base) else self._base
        for lists in (self._base, self._fresh):
            lists.widen(tokens)
        target.append(new, chunks, tokens, self.metric)
        self.drop_count += max(0, len(self) - self.room)
        if self.drop_count >= len(self._base):
            self.drop_count -= len(self._base)
            self._base, self._fresh = self._fresh, InvertedLists(self.width)

    def generations(self) -> list[Centroids]:
        """Those that count, as views."""
        base, first = self._base, self.drop_count
        result = [Centroids(base.queries[:, :, first:], base.slots[:, first:])]
        if len(self._fresh):
            result.append(Centroids(self._fresh.queries, self._fresh.slots))
        return result

    def recall(self, query: torch.Tensor, options: CTkvrConfig) -> torch.Tensor:
        """``[B, H, Q, *]`` int32: lists of the ``nprobe`` centroids nearest to a query.

        The nearest first, then what follows their best tokens, which may be behind the last one.
        -1 for lists that there are not. ``query [B, H, Q, G, D]``.
        """
        largest, following = options.similarity == "max", options.following
        units, _ = centroid.units(query, self.metric)
        scores = self._base.similarity(units, largest, self.drop_count)
        if len(self._fresh):
            scores = torch.cat([scores, self._fresh.similarity(units, largest)], dim=-1)
        nearest = scores.topk(min(options.nprobe, scores.shape[-1]), dim=-1)
        lists = self._take(nearest.indices)
        lists = lists.masked_fill((nearest.values == float("-inf")).unsqueeze(-1), -1)
        best = lists[..., :following, None]
        steps = torch.arange(1, following + 1, dtype=torch.int32, device=query.device)
        after = torch.where(best < 0, best, best + steps)
        return torch.cat([lists.flatten(3), after.flatten(3)], dim=3)

    def host_search(
        self, query: torch.Tensor, options: CTkvrConfig, pending: int
    ) -> ListSearch | None:
        """``recall`` and what follows it, for the CPU library; None for ``query`` of another dtype.

        ``pending``: newest tokens to be recalled with the lists.
        """
        if query.dtype != self._base.queries.dtype:
            return None
        generations = [self._base.generation(self.drop_count)]
        if len(self._fresh):
            generations.append(self._fresh.generation())
        return ListSearch(
            tuple(generations),
            options.nprobe,
            pending,
            options.following,
            options.similarity == "max",
            self.metric,
        )

    def recall_nbytes(self, nprobe: int) -> int:
        """Bytes that one recall of one query reads: the metric, all centroids and some lists."""
        metric = 0 if self.metric is None else self.metric.nbytes
        rows = len(self._base.queries) * self.heads
        lists = rows * min(nprobe, len(self)) * self._base.list_nbytes()
        return metric + self._base.queries[:, :, :1].nbytes * len(self) + lists

    def loaded(self) -> None:
        self._fresh.width = self._base.width

    def _take(self, index: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, c, width]`` int32 lists of ``index [B, H, Q, c]``; dropped ones count too."""
        older = len(self._base)
        lists = self._base.take(index.clamp(max=older - 1))
        if len(self._fresh):
            newer = self._fresh.take((index - older).clamp(min=0))
            lists = torch.where((index >= older).unsqueeze(-1), newer, lists)
        return lists


class InvertedFile(State):
    """Makes the lists of centroids.

    Attributes:
        queue: the centroids; None before the first lists.
        listed_len: tokens that the lists were made from; later ones are pending.
        list_builds: how often lists over all keys were made.
        keys_scored: keys that were read for it, over batch and KV heads.
    """

    queue: CentroidQueue | None = part(lambda: CentroidQueue(0, 0), key="", optional=True)
    listed_len: int = number(0, key="listed")
    list_builds: int = number(0, saved=False, reset_on_fork=True)
    keys_scored: int = number(0, saved=False, reset_on_fork=True)

    def __init__(self, options: CTkvrConfig) -> None:
        self.options = options

    def list_all(self, cold: ColdTokens, centroids: Centroids) -> None:
        """Make a new queue of these centroids; then no token is pending."""
        centroids = centroids.padding_first()
        width = self.options.list_len(len(cold), cold.budget)
        chunks = self._lists(cold, centroids, width)
        metric = _metric(cold, centroids.queries) if self.options.metric == "scores" else None
        queue = CentroidQueue(self.options.centroids_for(len(cold)), width, metric)
        queue.push(centroids, chunks, len(cold))
        self.queue = queue
        self.listed_len = len(cold)

    def keep_up(self, cold: ColdTokens, new: list[Centroids]) -> None:
        """Add ``new`` centroids, with lists over all keys.

        All lists are made again where too much is pending, where they are too short, and where
        sequences have different numbers of new centroids. Synchronizes with the device only where
        lists are made.
        """
        options, queue = self.options, self.queue
        assert queue is not None
        queue.room = max(queue.room, options.centroids_for(len(cold)))
        late = options.pending and len(cold) - self.listed_len > options.pending
        list_len = options.list_len(len(cold), cold.budget)
        # Padding goes to the front, where it is evicted first: that of one sequence must not evict
        # centroids of another.
        padded = any(bool((centroids.slots < 0).any()) for centroids in new)
        if late or padded or queue.width < _SHORT * list_len:
            self.list_all(cold, joined([*queue.generations(), *new]))
            return
        for centroids in new:
            queue.push(centroids, self._lists(cold, centroids, queue.width), len(cold))

    def pending(self, cold_len: int) -> int:
        """Number of tokens that every query recalls in addition to the lists."""
        return cold_len - min(cold_len, self.listed_len) if self.options.pending else 0

    def crop(self, length: int) -> None:
        """Remove all slots from ``length`` on from the lists."""
        self.listed_len = min(self.listed_len, length)
        super().crop(length)

    def stats(self) -> dict[str, Any]:
        """Counts."""
        return {
            "centroids": 0 if self.queue is None else len(self.queue),
            "list_builds": self.list_builds,
            "keys_scored": self.keys_scored,
        }

    def _lists(self, cold: ColdTokens, centroids: Centroids, width: int) -> Iterator[torch.Tensor]:
        self.list_builds += 1
        self.keys_scored += centroids.queries[:, :, 0, 0, 0].numel() * len(cold)
        return _best_keys(cold, centroids, width)


def _metric(cold: ColdTokens, like: torch.Tensor) -> torch.Tensor:
    """``[B, H, D, D]`` fp32: the covariance of the cold keys, of a mean variance of 1.

    A share of it is added to each variance, so that differences count in which all keys are alike.
    At most ``_SAMPLE`` keys of a sequence are read, spread evenly over the valid ones. The identity
    where keys are not finite. For queries ``like [B, H, *, *, D]``.
    """
    device, heads = like.device, like.shape[1]
    # The valid slots of each sequence first, in order.
    slots = cold.valid.int().argsort(dim=1, descending=True, stable=True)
    counts = cold.valid.sum(1, keepdim=True)
    size = min(_SAMPLE, len(cold))
    index = torch.arange(size, device=slots.device) * counts.clamp(min=size) // size
    counted = (index < counts)[:, None, :, None].to(device)
    ids = slots.gather(1, index).int()[:, None, None].expand(-1, heads, -1, -1).contiguous()
    keys = cold.store.gather(ids)[0][:, :, 0].to(device).float().masked_fill_(~counted, 0.0)
    mean = keys.sum(2, keepdim=True) / counted.sum(2, keepdim=True).clamp(min=1)
    centered = (keys - mean) * counted
    products = centered.mT @ centered
    variance = products.diagonal(dim1=2, dim2=3).mean(-1)[..., None, None]
    identity = torch.eye(like.shape[-1], dtype=torch.float32, device=device)
    metric = products / variance.clamp(min=1e-30) + _LEAST_VARIANCE * identity
    return torch.where(metric.isfinite().flatten(2).all(2)[..., None, None], metric, identity)


def _best_keys(cold: ColdTokens, centroids: Centroids, width: int) -> Iterator[torch.Tensor]:
    """Lists ``[B, H, *, width]`` int32, of some centroids after the others: their best keys.

    Best first, then -1; padding has an empty list. Reads all keys; on a CPU it copies them, or
    reads them some times (see ``centroid.key_lists``).
    """
    queries, slots = centroids
    batch, heads, count, _, dim = queries.shape
    chunk_len = _CHUNK_LEN
    if queries.is_cpu and preferred() is None:
        chunk_len = max(1, _CHUNK_ELEMENTS // (batch * heads * dim))

    def key_chunks() -> Iterator[tuple[int, torch.Tensor]]:
        for start, keys in cold.store.key_chunks(chunk_len):
            yield start, keys.to(queries.device)
            # Freed before the next one is made.
            del keys

    start = 0
    for ids in centroid.key_lists(
        queries, key_chunks, width, valid=cold.valid, scale=cold.scale, softcap=cold.softcap
    ):
        padding = slots[:, start : start + ids.shape[2]] < 0
        start += ids.shape[2]
        yield ids.masked_fill_(padding[:, None, :, None], -1)
    assert start == count, "there is a list for each centroid"
