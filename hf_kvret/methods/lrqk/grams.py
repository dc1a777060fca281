"""Grams: second moments of the queries and keys of a layer, which add up as tokens arrive."""

from __future__ import annotations

import math

import torch

from hf_kvret.contracts.state import State, Tensors, number, part, tensor

# Queries older than this many half-lives have a negligible weight in fp32.
_MEMORY = 24
_PENDING = 64
_FP32 = torch.float32
# Tokens converted to fp32 at a time.
CHUNK = 4096


class QueryBuffer(State):
    """At most ``_PENDING`` queries ``[B, Hq, q, D]`` in the order in which they came.

    The next position is on the device, too, so that a decode step can be captured once and replayed
    (then ``count`` is raised on the host).

    Attributes:
        count: queries in the buffer.
    """

    count: int = number(0, saved=False)
    _rows: torch.Tensor | None = tensor(saved=False)
    _valid: torch.Tensor | None = tensor(saved=False)
    _next: torch.Tensor | None = tensor(saved=False, batched=False)

    def put(self, queries: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Add ``queries [B, Hq, q, D]``; ``valid [B, q]`` bool or None. There must be room."""
        if self._rows is None or self._next is None:
            batch, heads, _, dim = queries.shape
            self._rows = queries.new_empty(batch, heads, _PENDING, dim)
            self._next = torch.zeros(1, dtype=torch.long, device=queries.device)
        more, places = queries.shape[2], self._next
        if more > 1:
            places = places + torch.arange(more, device=places.device)
        self._rows.index_copy_(2, places, queries)
        if valid is not None and self._valid is None:
            shape = len(queries), _PENDING
            self._valid = torch.ones(shape, dtype=torch.bool, device=queries.device)
        if self._valid is not None:
            mask = self._valid.new_ones(len(queries), more) if valid is None else valid
            self._valid.index_copy_(1, places, mask)
        self._next.add_(more)
        self.count += more

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Empty the buffer; returns its queries and their validity (None: all valid).

        Both are views that the next ``put`` overwrites. None if the buffer was empty.
        """
        if self._rows is None or self._next is None or not self.count:
            return None
        rows = self._rows[:, :, : self.count]
        valid = None if self._valid is None else self._valid[:, : self.count]
        self.count = 0
        self._next.zero_()
        return rows, valid


class QueryGrams(State):
    """Gram matrices of all queries, ``[B, F, D, D]`` fp32: one steady, one of recent queries.

    Weights in the second one halve every ``half_life`` tokens, so that a short question after a
    long document counts. To make the heads of a set comparable, each is divided by the length of
    its first queries; apart from that, how tokens are split into passes makes no difference.

    Single tokens are buffered and added together.

    Attributes:
        sets: F, the number of KV heads, or of query heads; 0 where it is set later, before the
            first queries.
    """

    steady: torch.Tensor | None = tensor(shared=True, dims="B F D D", dtype=_FP32, finite=True)
    recent: torch.Tensor | None = tensor(shared=True, dims="B F D D", dtype=_FP32, finite=True)
    scale: torch.Tensor | None = tensor(shared=True, dims="B Q", dtype=_FP32, finite=True)
    sets: int = number(0, saved=False)
    _is_scaled: bool = number(False, saved=False)
    _buffer: QueryBuffer = part(QueryBuffer, saved=False)

    def __init__(self, sets: int, half_life: float) -> None:
        self.sets, self.half_life = sets, half_life
        self._count_before = 0

    def add(self, queries: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Add the newest ``queries [B, Hq, q, D]``; ``valid [B, q]`` bool or None."""
        if self._buffer.count + queries.shape[2] > _PENDING:
            self.fold()
        if queries.shape[2] > _PENDING:
            # A prompt is not copied.
            self._fold(queries, valid)
            return
        self._buffer.put(queries, valid)

    def before_capture(self) -> None:
        """Make room for the token of a step that will be captured."""
        if self._buffer.count == _PENDING:
            self.fold()
        self._count_before = self._buffer.count

    def capture_failed(self) -> None:
        """The captured step did nothing: restore the count."""
        self._buffer.count = self._count_before

    def replayed(self) -> None:
        """A captured ``add`` of one token was replayed."""
        self._buffer.count += 1
        if self._buffer.count == _PENDING:
            self.fold()

    def fold(self) -> None:
        """Add buffered queries to the matrices."""
        batch = self._buffer.take()
        if batch is not None:
            self._fold(*batch)

    def _fold(self, queries: torch.Tensor, valid: torch.Tensor | None) -> None:
        for start in range(0, queries.shape[2], CHUNK):
            chunk = queries[:, :, start : start + CHUNK].float()
            if valid is not None:
                inside = valid[:, None, start : start + CHUNK, None]
                chunk = chunk.masked_fill(~inside, 0.0)
            self._fold_chunk(chunk, valid is not None)

    def _fold_chunk(self, queries: torch.Tensor, padding: bool) -> None:
        """Add ``queries [B, Hq, q, D]`` fp32, zeros for padding."""
        batch, _, count, dim = queries.shape
        self._set_scale(queries, padding)
        assert self.scale is not None
        heads = (queries * self.scale[:, :, None, None]).view(batch, self.sets, -1, count, dim)
        flat = heads.flatten(2, 3)
        steady = flat.mT @ flat
        newest_len = min(count, math.ceil(_MEMORY * self.half_life))
        age = torch.arange(newest_len - 1, -1, -1, device=queries.device, dtype=torch.float32)
        weight = torch.exp2(-age / self.half_life)
        newest = heads[:, :, :, count - newest_len :]
        recent = (newest * weight[:, None]).flatten(2, 3).mT @ newest.flatten(2, 3)
        if self.steady is None or self.recent is None:
            self.steady, self.recent = steady, recent
        else:
            self.steady = self.steady + steady
            self.recent = self.recent * 2.0 ** (-count / self.half_life) + recent

    def weighted(self, recency: float) -> torch.Tensor:
        """``[B, F, D, D]``: both, each with trace 1, mixed; ``recency`` weighs the recent one."""
        self.fold()
        assert self.steady is not None and self.recent is not None
        return (1.0 - recency) * _normal(self.steady) + recency * _normal(self.recent)

    def reorder(self, rows: torch.Tensor) -> None:
        """As for every state, after a fold, because the batch size may change."""
        self.fold()
        self._buffer.reset()
        super().reorder(rows)

    def state_dict(self) -> Tensors:
        """As for every state, after a fold."""
        self.fold()
        return super().state_dict()

    def loaded(self) -> None:
        assert self.steady is not None, "it is loaded"
        self.sets = self.steady.shape[1]

    def _set_scale(self, queries: torch.Tensor, padding: bool) -> None:
        """One over the root mean square of the first queries, ``[B, Hq]``; 0 while a row has none.

        Never synchronizes with the device: without padding, the first pass fixes it.
        """
        if self._is_scaled:
            return
        self._is_scaled = not padding
        length = queries.square().mean((2, 3)).sqrt()
        scale = torch.where(length > 0, 1.0 / length.clamp(min=1e-30), 0.0)
        self.scale = scale if self.scale is None else torch.where(self.scale > 0, self.scale, scale)


class KeyGrams(State):
    """Gram matrix, sum and count of a layer's cold keys: ``[B, Hkv, D, D]``, fp32."""

    gram: torch.Tensor | None = tensor(shared=True, dims="B H D D", dtype=_FP32, finite=True)
    total: torch.Tensor | None = tensor(shared=True, dims="B H D", dtype=_FP32, finite=True)
    count: torch.Tensor | None = tensor(shared=True, dims="B", dtype=_FP32, finite=True)

    def add(self, keys: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Add ``keys [B, Hkv, n, D]``; ``valid [B, n]`` bool or None."""
        for start in range(0, keys.shape[2], CHUNK):
            part = slice(start, start + CHUNK)
            self._add_chunk(keys[:, :, part].float(), None if valid is None else valid[:, part])

    def _add_chunk(self, keys: torch.Tensor, valid: torch.Tensor | None) -> None:
        if valid is None:
            count = torch.full((len(keys),), keys.shape[2], device=keys.device, dtype=torch.float32)
        else:
            keys = keys.masked_fill(~valid[:, None, :, None], 0.0)
            count = valid.sum(1).float()
        gram, total = keys.mT @ keys, keys.sum(2)
        if self.gram is None or self.total is None or self.count is None:
            self.gram, self.total, self.count = gram, total, count
        else:
            self.gram, self.total = self.gram + gram, self.total + total
            self.count = self.count + count

    def matrix(self, center: bool) -> torch.Tensor:
        """``[B, Hkv, D, D]``, of the keys less their mean with ``center``."""
        assert self.gram is not None and self.total is not None and self.count is not None
        if not center:
            return self.gram
        # A difference of two large matrices. fp32 sums are precise enough for a mean of about a
        # hundred times the spread.
        total = self.total.double()
        outer = total.unsqueeze(-1) * total.unsqueeze(-2)
        return self.gram.double() - outer / self.count.clamp(min=1.0)[:, None, None, None]

    def spread(self, to_key: torch.Tensor, center: bool) -> torch.Tensor:
        """``[B, F, 1, r]`` fp32 root mean square of the keys' proxies by ``to_key``."""
        assert self.count is not None
        gram = self.matrix(center).double()
        gram = gram.repeat_interleave(to_key.shape[1] // gram.shape[1], dim=1)
        squares = (to_key.double() * (gram @ to_key.double())).sum(-2, keepdim=True)
        count = self.count.clamp(min=1.0)[:, None, None, None]
        return (squares.clamp(min=0.0) / count).sqrt().float()

    def mean(self) -> torch.Tensor:
        """``[B, Hkv, D]`` fp32; 0 without keys."""
        assert self.total is not None and self.count is not None
        return self.total / self.count.clamp(min=1.0)[:, None, None]


def _normal(gram: torch.Tensor) -> torch.Tensor:
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return gram / trace.clamp(min=torch.finfo(gram.dtype).tiny)[..., None, None]
