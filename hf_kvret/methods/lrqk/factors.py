"""Factors: linear maps that make proxies of queries and keys, and the Grams that give the best.

Proxies stand for keys in a layer's scores, in bf16 or in a byte an element.

Gram matrices, G_Q = Q^T Q and G_K = K^T K of all queries and keys, add up over blocks of tokens.
No l x r or l x l matrix is ever made. Factors are computed in fp64: Grams of real heads have
eigenvalues over many orders of magnitude. Dimensions: F sets of factors, D head dim, r rank;
leading dimensions ``...`` are batch and sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_kvret.contracts.state import State, Tensors, number, part, tensor
from hf_kvret.contracts.token_buffer import TokenBuffer, tokens
from hf_kvret_kernels.proxy import KeptQueries

# Squared singular values below this share of the largest are rounding, not directions.
_LEAST_SQUARE = 1e-13
# Queries older than this many half-lives have a negligible weight in fp32.
_MEMORY = 24
_PENDING = 64
_FP32 = torch.float32
# Tokens converted to fp32 at a time; on a CPU fewer, whose memory is used again.
CHUNK_LEN = 4096
_CPU_CHUNK_LEN = 1024

_MOST = 127.0
# The range of int8 is so many root mean squares of a column, as later keys may lie further out.
# A root mean square that has grown by the second factor makes a new range.
_WIDEST, _OUTGROWN = 8.0, 2.0


@dataclass(frozen=True, eq=False)
class Factors:
    """Maps of queries and keys to their proxies, ``q @ to_query`` and ``k @ to_key``.

    Both ``[..., D, r]`` fp32; the inner product of two proxies stands for that of query and key.
    """

    to_query: torch.Tensor
    to_key: torch.Tensor

    def error(self, query_gram: torch.Tensor, key_gram: torch.Tensor) -> torch.Tensor:
        """``[...]`` fp64 share of the squared scores ``|Q K^T|^2`` that proxies miss, exactly.

        With E = I - to_query to_key^T it is ``tr(G_Q E G_K E^T) / tr(G_Q G_K)``: the relative
        squared Frobenius error over all pairs of the queries and keys in the Grams. 0 where there
        are no scores.
        """
        g_q, g_k = query_gram.double(), key_gram.double()
        difference = -self.to_query.double() @ self.to_key.double().mT
        difference.diagonal(dim1=-2, dim2=-1).add_(1.0)
        loss = (g_q @ difference @ g_k * difference).sum((-2, -1)).clamp(min=0.0)
        return loss / (g_q * g_k).sum((-2, -1)).clamp(min=torch.finfo(torch.float64).tiny)


def closed_form(query_gram: torch.Tensor, key_gram: torch.Tensor, rank: int) -> Factors:
    """The factors of the best rank-r approximation of ``Q K^T``, from ``[..., D, D]`` Grams.

    With G_K = L L^T and the eigenvectors V of L^T G_Q L, whose eigenvalues are the squared
    singular values S of Q K^T: to_query = L V S^(-1/2), to_key = G_Q L V S^(-3/2), for the r
    largest. Directions without weight are left out, so that Grams may be singular.

    The paper solves for the same optimum by alternating least squares (section 4.2), with
    penalties that keep the factors close to Q and K themselves, which nothing here needs.

    Raises:
        ValueError: a Gram that is not finite.
    """
    g_q, g_k = finite(query_gram, key_gram)
    values, vectors = torch.linalg.eigh(g_k)
    root = vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)
    squares, turns = torch.linalg.eigh(root.mT @ g_q @ root)
    squares, turns = squares[..., -rank:].flip(-1), turns[..., -rank:].flip(-1)
    mask = squares > squares[..., :1].clamp(min=0.0) * _LEAST_SQUARE
    singular = squares.masked_fill(~mask, 1.0).sqrt()
    to_query = root @ turns * singular.rsqrt().unsqueeze(-2)
    to_key = g_q @ root @ turns * singular.pow(-1.5).unsqueeze(-2)
    to_query, to_key = (
        factor.masked_fill(~mask.unsqueeze(-2), 0.0).float() for factor in (to_query, to_key)
    )
    return Factors(to_query, to_key)


def finite(*grams: torch.Tensor) -> list[torch.Tensor]:
    """The ``grams`` in fp64, after one wait for the device; ValueError where one is not finite."""
    doubles = [gram.double() for gram in grams]
    # In fp64 a sum of a Gram's finite elements stays finite.
    if not bool(torch.isfinite(torch.stack([gram.abs().sum() for gram in doubles]).sum())):
        raise ValueError(
            "queries or keys of this layer are NaN or infinite, or too large for sums of squares "
            "in fp32, so lrqk has no factors for them: run the model in bfloat16 or float32 rather "
            "than float16, or use cache_implementation='paris'"
        )
    return doubles


def float_chunks(rows: torch.Tensor, valid: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Some tokens of ``rows [B, H, n, D]`` after the others, in fp32, zeros for padding."""
    step = min(CHUNK_LEN, _CPU_CHUNK_LEN) if rows.is_cpu else CHUNK_LEN
    for start in range(0, rows.shape[2], step):
        chunk = rows[:, :, start : start + step].float()
        if valid is not None:
            chunk = chunk.masked_fill(~valid[:, None, start : start + step, None], 0.0)
        yield chunk


class QueryBuffer(State):
    """At most ``_PENDING`` queries ``[B, Hq, q, D]`` in the order in which they came.

    The next position is on the device, too, so that a decode step can be captured once and replayed
    (``count`` is raised on the host before). Behind it is a ticket of the kernel that writes.

    Attributes:
        count: queries in the buffer.
        new: the newest of them, not written yet; None: all are.
    """

    count: int = number(0, saved=False)
    _rows: torch.Tensor | None = tensor(saved=False)
    _valid: torch.Tensor | None = tensor(saved=False)
    _next: torch.Tensor | None = tensor(saved=False, batched=False)
    new: torch.Tensor | None = tensor(saved=False, shared=True)

    def put(self, queries: torch.Tensor, valid: torch.Tensor | None, later: bool = False) -> None:
        """Add ``queries [B, Hq, q, D]``; ``valid [B, q]`` bool or None. There must be room.

        ``later``: they may be written by whoever calls ``take_new``, which follows.
        """
        self._write()
        self.new = queries
        self.count += queries.shape[2]
        if not later or valid is not None or self._valid is not None or self._rows is None:
            self._write(valid)

    def take_new(self, query: torch.Tensor) -> KeptQueries | None:
        """Where a kernel is to write ``query [B, Hq, 1, D]``; None where it is written."""
        rows, at = self._rows, self._next
        if self.new is not query or query.shape[2] > 1 or rows is None or at is None:
            self._write()
            return None
        self.new = None
        return KeptQueries(rows, at)

    def _write(self, valid: torch.Tensor | None = None) -> None:
        queries, self.new = self.new, None
        if queries is None:
            return
        if self._rows is None or self._next is None:
            batch, heads, _, dim = queries.shape
            self._rows = queries.new_empty(batch, heads, _PENDING, dim)
            self._next = torch.zeros(2, dtype=torch.long, device=queries.device)
        count, indices = queries.shape[2], self._next[:1]
        if count > 1:
            indices = indices + torch.arange(count, device=indices.device)
        self._rows.index_copy_(2, indices, queries)
        if valid is not None and self._valid is None:
            shape = len(queries), _PENDING
            self._valid = torch.ones(shape, dtype=torch.bool, device=queries.device)
        if self._valid is not None:
            mask = self._valid.new_ones(len(queries), count) if valid is None else valid
            self._valid.index_copy_(1, indices, mask)
        self._next[:1].add_(count)

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Empty the buffer; returns its queries and their validity (None: all valid).

        Both are views that the next ``put`` overwrites. None if the buffer was empty.
        """
        self._write()
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

    steady: torch.Tensor | None = tensor(shared=True, dims="B f D D", dtype=_FP32)
    recent: torch.Tensor | None = tensor(shared=True, dims="B f D D", dtype=_FP32)
    scale: torch.Tensor | None = tensor(shared=True, dims="B Q", dtype=_FP32)
    sets: int = number(0, saved=False)
    _is_scaled: bool = number(False, saved=False)
    buffer: QueryBuffer = part(QueryBuffer, saved=False)

    def __init__(self, sets: int, half_life: float) -> None:
        self.sets, self.half_life = sets, half_life
        self._count_before = 0

    def add(self, queries: torch.Tensor, valid: torch.Tensor | None, later: bool = False) -> None:
        """Add the newest ``queries [B, Hq, q, D]``; other arguments as of ``QueryBuffer.put``."""
        self._make_room(queries.shape[2])
        if queries.shape[2] > _PENDING:
            # A prompt is not copied.
            self._fold(queries, valid)
            return
        self.buffer.put(queries, valid, later)

    def before_capture(self) -> None:
        """Make room for the token of a step that will be captured."""
        self._make_room(1)
        self._count_before = self.buffer.count

    def capture_failed(self) -> None:
        """The captured step did nothing: restore the count."""
        self.buffer.count, self.buffer.new = self._count_before, None

    def before_replay(self) -> None:
        """A captured ``add`` of one token is about to be replayed."""
        self._make_room(1)
        self.buffer.count += 1

    def fold(self) -> None:
        """Add buffered queries to the matrices."""
        batch = self.buffer.take()
        if batch is not None:
            self._fold(*batch)

    def _make_room(self, count: int) -> None:
        if self.buffer.count + count > _PENDING:
            self.fold()

    def _fold(self, queries: torch.Tensor, valid: torch.Tensor | None) -> None:
        later = queries.shape[2]
        for chunk in float_chunks(queries, valid):
            later -= chunk.shape[2]
            # Where the newest are padding, older ones count.
            self._fold_chunk(chunk, valid is not None, later if valid is None else 0)

    def _fold_chunk(self, queries: torch.Tensor, padding: bool, later: int) -> None:
        """Add ``queries [B, Hq, q, D]`` fp32, zeros for padding; ``later`` ones will follow."""
        batch, _, count, dim = queries.shape
        self._set_scale(queries, padding)
        assert self.scale is not None
        # Scaled after the product, which is smaller than the queries.
        squares = self.scale.square()[:, :, None, None]

        def gram(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            products = (left.mT @ right).mul_(squares)
            return products.view(batch, self.sets, -1, dim, dim).sum(2)

        steady = gram(queries, queries)
        newest_len = max(0, min(count, math.ceil(_MEMORY * self.half_life) - later))
        age = torch.arange(newest_len - 1, -1, -1, device=queries.device, dtype=torch.float32)
        weight = torch.exp2(-age / self.half_life)
        newest = queries[:, :, count - newest_len :]
        recent = gram(newest * weight[:, None], newest)
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
        self.buffer.reset()
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

    gram: torch.Tensor | None = tensor(shared=True, dims="B H D D", dtype=_FP32)
    total: torch.Tensor | None = tensor(shared=True, dims="B H D", dtype=_FP32)
    count: torch.Tensor | None = tensor(shared=True, dims="B", dtype=_FP32)

    def add(self, keys: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Add ``keys [B, Hkv, n, D]``; ``valid [B, n]`` bool or None."""
        if valid is None:
            count = torch.full((len(keys),), keys.shape[2], device=keys.device, dtype=torch.float32)
        else:
            count = valid.sum(1).float()
        self.count = count if self.count is None else self.count + count
        for chunk in float_chunks(keys, valid):
            gram, total = chunk.mT @ chunk, chunk.sum(2)
            self.gram = gram if self.gram is None else self.gram + gram
            self.total = total if self.total is None else self.total + total

    def matrix(self) -> torch.Tensor:
        """``[B, Hkv, D, D]`` fp64, of the keys less their mean."""
        assert self.gram is not None and self.total is not None and self.count is not None
        # A difference of two large matrices. fp32 sums are precise enough for a mean of about a
        # hundred times the spread.
        total = self.total.double()
        outer = total.unsqueeze(-1) * total.unsqueeze(-2)
        return self.gram.double() - outer / self.count.clamp(min=1.0)[:, None, None, None]

    def spread(self, to_key: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        """``[B, Hkv, 1, r]`` fp32 root mean square of proxies of keys less ``center [B, H, D]``."""
        assert self.count is not None
        squares = (to_key.double() * (self.matrix() @ to_key.double())).sum(-2, keepdim=True)
        count = self.count.clamp(min=1.0)[:, None, None, None]
        moved = (self.mean() - center).unsqueeze(2) @ to_key
        return (squares.clamp(min=0.0) / count + moved.square()).sqrt().float()

    def mean(self) -> torch.Tensor:
        """``[B, Hkv, D]`` fp32; 0 without keys."""
        assert self.total is not None and self.count is not None
        return self.total / self.count.clamp(min=1.0)[:, None, None]


def _normal(gram: torch.Tensor) -> torch.Tensor:
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return gram / trace.clamp(min=torch.finfo(gram.dtype).tiny)[..., None, None]


def project(
    to_key: torch.Tensor, keys: Iterable[torch.Tensor], mean: torch.Tensor | None = None
) -> Iterator[torch.Tensor]:
    """Proxies ``[B, F, *, r]`` fp32 of all ``keys [B, Hkv, *, D]``, some after the others.

    ``to_key [B, F, D, r]``; ``mean [B, Hkv, D]`` is subtracted from the keys.
    """
    batch, _, dim, rank = to_key.shape
    for block in keys:
        maps = to_key.view(batch, block.shape[1], -1, dim, rank)
        for chunk in float_chunks(block, None):
            # The mean's proxy taken off later would cost digits where products are rounded.
            deviations = chunk if mean is None else chunk - mean.unsqueeze(2)
            yield (deviations.unsqueeze(2) @ maps).flatten(1, 2)


class Proxies(State):
    """``[B, F, n, r]`` rows, and for int8 the step of each column.

    Attributes:
        steps: ``[B, F, 1, r]`` fp32, quantization step of each int8 column; None for bf16. Set by
            ``replace``; outliers, and rows appended later, are clamped to the range.
    """

    steps: torch.Tensor | None = tensor(
        optional=True, shared=True, dims="B f 1 r", dtype=torch.float32
    )
    _rows: TokenBuffer = tokens(dims="B f N r", dtype=(torch.bfloat16, torch.int8))

    @property
    def rows(self) -> torch.Tensor:
        """View ``[B, F, n, r]``."""
        return self._rows.rows

    def replace(
        self,
        chunks: Iterable[torch.Tensor],
        spread: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
    ) -> None:
        """Replace all rows by ``chunks`` of fp32 rows, ``[B, F, *, r]`` each, at least one.

        ``spread [B, F, 1, r]``: root mean square of each column over the valid tokens, for int8;
        None for bf16.
        ``keep [B]`` bool: sequences that keep their old rows.
        """
        old = None if keep is None else (self.rows, self.steps)
        self.steps = None if spread is None else (spread * (_WIDEST / _MOST)).clamp(min=1e-30)
        self._rows = TokenBuffer()
        self._rows.append(torch.cat([self._coded(chunk) for chunk in chunks], dim=2))
        if old is not None and keep is not None:
            mask, (old_rows, old_steps) = keep[:, None, None, None], old
            self.rows.copy_(torch.where(mask, old_rows, self.rows))
            if self.steps is not None and old_steps is not None:
                self.steps = torch.where(mask, old_steps, self.steps)

    def append(self, rows: torch.Tensor) -> None:
        """Add ``rows [B, F, m, r]`` of any floating type."""
        self._rows.append(self._coded(rows))

    def outgrown(self, spread: torch.Tensor) -> torch.Tensor:
        """``[B, F]``: where int8 needs another range, for columns of this ``spread``."""
        limit = torch.inf if self.steps is None else self.steps * (_OUTGROWN * _MOST / _WIDEST)
        return (spread > limit).any(-1).squeeze(-1)

    def _coded(self, rows: torch.Tensor) -> torch.Tensor:
        if self.steps is None:
            return rows.bfloat16()
        rows = (rows.float() / self.steps).round_().clamp_(-_MOST, _MOST)
        return rows.nan_to_num_(nan=0.0).to(torch.int8)
