"""CentroidQueue: centroids in order of age, each with a list of slots in two or three bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from hf_kvret.contracts.schema import Schema, check_range, damaged
from hf_kvret.contracts.state import State, number, part
from hf_kvret.contracts.token_buffer import MOST_SLOT, TokenBuffer, tokens
from hf_kvret_kernels import centroid
from hf_kvret_kernels.host_step import Generation, ListSearch

_NARROW = (1 << 16) - 1
MOST_TOKENS = (1 << 24) - 1
"""Most tokens whose slots fit into three bytes."""
# Ids unpacked, or numbers of queries converted to fp32, at once.
_NUMBERS = 1 << 18

_small = partial(TokenBuffer, 64)


class InvertedLists(State):
    """Bundles of queries ``[B, H, m, G, D]`` with slots ``[B, H, m, rho]``.

    A slot is stored plus 1, so that 0 is none: the low 16 bits, and 8 more bits once slots need
    them. So a slot takes 2 bytes up to 65,535 tokens, 3 above.

    Attributes:
        width: slots of a list, rho.
    """

    # A row is a centroid.
    _queries: TokenBuffer = tokens(_small, dims="B H m G D")
    _inverse: TokenBuffer = tokens(_small, dims="B H m G", dtype=torch.float32)
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

    @property
    def ids(self) -> torch.Tensor:
        """``[B, H, m, rho]`` int32, -1 for none; unpacks all lists, which takes much memory."""
        return self.some_ids(slice(None))

    def some_ids(self, part: slice) -> torch.Tensor:
        """``[B, H, *, rho]`` int32: the lists of the centroids ``part``."""
        high = self._high.rows[:, :, part] if len(self._high) else None
        return _unpack(self._low.rows[:, :, part], high)

    def chunks(self, first: int = 0) -> Iterator[torch.Tensor]:
        """``[B, H, *, rho]`` int32, some lists after the others, from the one of ``first`` on."""
        step = self.some(self.width) if len(self) else 1
        for start in range(first, len(self), step):
            yield self.some_ids(slice(start, start + step))

    def some(self, numbers: int) -> int:
        """Centroids to process at once, at least 1, if each has ``numbers`` numbers per head."""
        batch, heads = self.queries.shape[:2]
        return max(1, _NUMBERS // max(1, batch * heads * numbers))

    def append(
        self,
        queries: torch.Tensor,
        slots: torch.Tensor,
        parts: Iterable[torch.Tensor],
        tokens: int,
    ) -> None:
        """Add ``queries [B, H, m, G, D]`` of ``slots [B, m]`` with lists.

        ``parts`` are their lists ``[B, H, *, <= rho]`` int32 in order, each packed before the next
        one is asked for. All ids are below ``tokens``.
        """
        self.widen(tokens)
        self._pack(parts, queries, len(self._high) > 0 or tokens > _NARROW)
        self._queries.append(queries)
        self._slots.append(slots[:, None])
        count, numbers = queries.shape[2], queries.shape[3] * queries.shape[4]
        like = queries.new_empty(*queries.shape[:2], 0, queries.shape[3], dtype=torch.float32)
        inverse = self._inverse.reserve(count, like)
        for some, into in zip(
            *(x.split(self.some(numbers), 2) for x in (queries, inverse)), strict=True
        ):
            norms = torch.linalg.vector_norm(some.float(), dim=-1).clamp_(min=1e-30)
            into.copy_(norms.reciprocal_())

    def widen(self, tokens: int) -> None:
        """Make room for slots below ``tokens``."""
        assert tokens <= MOST_TOKENS, "the index refuses more"
        if tokens > _NARROW and len(self) and not len(self._high):
            zeros = torch.zeros_like(self._low.rows, dtype=torch.uint8)
            self._high.append(zeros)

    def similarity(self, query: torch.Tensor, drop_count: int = 0) -> torch.Tensor:
        """``[B, H, Q, m]`` fp32 of ``query [B, H, Q, G, D]``.

        -inf for the oldest ``drop_count``.
        """
        result = centroid.similarity(query, self.queries, self._inverse.rows)
        mask = (self.slots < 0)[:, None, None]
        if drop_count:
            mask = mask | (torch.arange(len(self), device=query.device) < drop_count)
        return result.masked_fill(mask, float("-inf"))

    def take(self, index: torch.Tensor) -> torch.Tensor:
        """``[B, H, Q, c, rho]`` int32 lists of the centroids ``index [B, H, Q, c]``."""
        high = self._high.rows if len(self._high) else None
        return centroid.take_lists(self._low.rows, high, index)

    def generation(self, first: int = 0) -> Generation:
        """Views of the centroids from ``first`` on, for the CPU library."""
        parts = [self._queries, self._inverse, self._low, self._high]
        rows = [part.rows[:, :, first:] if len(part) else None for part in parts]
        queries, inverse, low, high = rows
        assert queries is not None and inverse is not None and low is not None
        return Generation(queries, inverse, self.slots[:, first:], low, high)

    def crop(self, length: int) -> None:
        """Remove all slots from ``length`` on from the lists; centroids stay."""
        if not len(self):
            return
        old = self.fork()
        self._low, self._high = _small(), _small()
        lists = (ids.masked_fill_(ids >= length, -1) for ids in old.chunks())
        self._pack(lists, self.queries, len(old._high) > 0)

    @property
    def generation_form(self) -> tuple[int, int, bool]:
        """Query heads of a KV head, slots of a list, and whether slots take three bytes."""
        return self.queries.shape[3], self._low.rows.shape[3], len(self._high) > 0

    def list_nbytes(self) -> int:
        """Bytes of one list of one head and batch row."""
        return self.width * (3 if len(self._high) else 2)

    def loaded(self) -> None:
        self.width = self._low.rows.shape[-1]

    def check_loaded(self, schema: Schema) -> None:
        """ValueError for lists that name tokens that are not cold."""
        if not len(self):
            return
        check_range("slots", self.slots, -1, MOST_SLOT)
        for ids in self.chunks():
            check_range("lists", ids, -1, schema["N"] - 1)

    def _pack(self, parts: Iterable[torch.Tensor], queries: torch.Tensor, wide: bool) -> None:
        """Append the lists ``parts`` of as many centroids as there are ``queries``."""
        batch, heads, count = queries.shape[:3]
        like = queries.new_empty(batch, heads, 0, self.width, dtype=torch.int16)
        room = {"low": self._low.reserve(count, like)}
        if wide:
            room["high"] = self._high.reserve(count, like.byte())
        start = 0
        for ids in parts:
            for name, plane in room.items():
                into = plane[:, :, start : start + ids.shape[2]]
                into[..., : ids.shape[3]] = _low(ids) if name == "low" else _high(ids)
                into[..., ids.shape[3] :] = 0
            start += ids.shape[2]
        assert start == count, "there is a list for each centroid"


def _low(ids: torch.Tensor) -> torch.Tensor:
    # Not by a cast alone: the result of an out-of-range cast depends on the device.
    return (ids + 0x8001).bitwise_and_(0xFFFF).sub_(0x8000)


def _high(ids: torch.Tensor) -> torch.Tensor:
    return (ids + 1).bitwise_right_shift_(16)


def _unpack(low: torch.Tensor, high: torch.Tensor | None) -> torch.Tensor:
    ids = low.int().bitwise_and_(0xFFFF)
    if high is not None:
        ids |= high.int().bitwise_left_shift_(16)
    return ids.sub_(1)


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

    def chunks(self) -> Iterator[torch.Tensor]:
        """All lists that count, ``[B, H, *, width]`` int32."""
        yield from self._base.chunks(self.drop_count)
        yield from self._fresh.chunks()

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

    def check_loaded(self, schema: Schema) -> None:
        """ValueError for two generations that do not go on, or more dropped than there are."""
        super().check_loaded(schema)
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
