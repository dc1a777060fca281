"""What stands for the cold tokens that a query does not select: their mean and covariance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.contracts.state import State, Tensors, number, tensor, transient
from hf_kvret.contracts.store import AttentionResult
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.merge import merge_partials

# Rows that are added up in fp32 before fp64, and rows that are read from a store at once.
_CHUNK_LEN, _READ_LEN = 64, 4096
# With a smaller spread of scores a regression would follow rounding errors.
_LEAST_SPREAD = 1e-3


class ColdSums(State):
    """Sums of keys and values of the cold tokens that may be retrieved, and of their products.

    In fp64, as there may be a million rows in a sum; products are of rows less their mean. What
    lags behind is made of the store's rows, and so is all of it after a crop.

    Args:
        key_dim: numbers of a key.
        value_dim: numbers of a value.
        value_in_key: values are the first numbers of keys.

    Attributes:
        end: slot after the last token that was added.
    """

    # [B, Hkv, 1, Dk + Dv], or Dk where values are numbers of the keys.
    _sums: torch.Tensor | None = tensor(shared=True, dims="B H 1 w", dtype=torch.float64)
    _counts: torch.Tensor | None = tensor(shared=True, dims="B 1", dtype=torch.int64)
    # These multiply each number of a key with each number of its row.
    _products: torch.Tensor | None = tensor(shared=True, dims="B H D w", dtype=torch.float64)
    end: int = number(0)
    # None: to be made of the sums.
    _mean: MeanToken | None = transient()

    def __init__(self, key_dim: int, value_dim: int, value_in_key: bool = False) -> None:
        # Where the numbers of a key and of a value are in a sum.
        self._key = slice(key_dim)
        start = 0 if value_in_key else key_dim
        self._value = slice(start, start + value_dim)

    def add(self, block: TokenBlock, sink_slots: torch.Tensor | None = None) -> None:
        """Add the tokens from slot ``end`` on that are valid, and not in ``sink_slots [B, s]``."""
        assert block.start == self.end, "tokens come in order"
        counted = _counted(block, sink_slots)
        sides = [block.keys] if block.value_in_key else [block.keys, block.values]
        for start in range(0, len(block), _READ_LEN):
            some = slice(start, start + _READ_LEN)
            rows = torch.cat([x[:, :, some] for x in sides], dim=-1).float()
            self._add_rows(rows, None if counted is None else counted[:, some])
        self.end, self._mean = block.end, None

    def _add_rows(self, rows: torch.Tensor, counted: torch.Tensor | None) -> None:
        """Add ``rows [B, Hkv, n, w]`` that are ``counted [B, n]``; None: all are."""
        if counted is None:
            counts = torch.full((len(rows), 1), rows.shape[2], device=rows.device)
        else:
            counts, left_out = counted.sum(1, keepdim=True), ~counted[:, None, :, None]
            rows = rows.masked_fill(left_out, 0.0)
        sums = _sum(rows).unsqueeze(2)
        mean = _mean(sums, counts)
        centered = rows - mean.float()
        if counted is not None:
            centered.masked_fill_(left_out, 0.0)
        products = (centered[..., self._key].mT @ centered).double()
        if self._sums is not None and self._counts is not None and self._products is not None:
            # The means of both parts differ, which adds the product of the difference.
            total = counts + self._counts
            weight = (counts * self._counts / total.clamp(min=1))[:, None, :, None]
            shift = mean - _mean(self._sums, self._counts)
            products += self._products + weight * (shift[..., self._key].mT @ shift)
            sums, counts = sums + self._sums, total
        self._sums, self._counts, self._products = sums, counts, products

    def catch_up(self, cold: ColdTokens, heads: int, value_in_key: int) -> None:
        """Add what is missing of ``cold``, of ``heads`` KV heads, as the store reads it back."""
        while self.end < len(cold):
            stop = min(len(cold), self.end + _READ_LEN)
            device = cold.valid.device
            slots = torch.arange(self.end, stop, dtype=torch.int32, device=device)
            ids = slots.expand(len(cold.valid), heads, 1, -1).contiguous()
            keys, values = (rows[:, :, 0].to(device) for rows in cold.store.gather(ids))
            valid = cold.valid[:, self.end : stop]
            self.add(TokenBlock(keys, values, self.end, valid, value_in_key=value_in_key))

    def crop(self, length: int) -> None:
        """Forget everything where tokens are dropped: what was added can't be taken off exactly."""
        if length < self.end:
            self.reset()

    def state_dict(self) -> Tensors:
        """As every state's; nothing where rows were infinite: such sums could not be loaded."""
        finite = self._products is not None and bool(self._products.isfinite().all())
        return super().state_dict() if finite else {}

    def nbytes(self) -> int:
        """As every state's, with the mean."""
        return super().nbytes() + self.mean_nbytes()

    def mean_nbytes(self) -> int:
        """Bytes of the mean as it is, which a step reads."""
        mean = self._mean
        return 0 if mean is None else mean.moments.nbytes + mean.values.nbytes

    def mean(self) -> MeanToken:
        """The mean of what was added, which is a token or more."""
        if self._mean is None:
            assert self._sums is not None and self._counts is not None, "nothing was added"
            assert self._products is not None, "they come with the sums"
            means, products = (_mean(x, self._counts).float() for x in (self._sums, self._products))
            covariances = (products[..., side].mT for side in (self._key, self._value))
            moments = torch.cat([means[..., self._key], *covariances], dim=2)
            values = means[..., self._value].contiguous()
            self._mean = MeanToken(moments, values, self._counts.contiguous())
        return self._mean


@dataclass(frozen=True, eq=False)
class ColdTokensWithMean(ColdTokens):
    """Cold tokens of which those that a query does not select count by their moments."""

    mean: MeanToken

    def begin(self, query: torch.Tensor, ids: torch.Tensor) -> Callable[[], AttentionResult]:
        finish = super().begin(query, ids)

        def merged() -> AttentionResult:
            out, lse = finish()
            mean_out, mean_lse = attend_unselected(self.mean, query, ids, self.scoring)
            return merge_partials([out, mean_out], [lse, mean_lse])

        return merged


def attend_unselected(
    mean: MeanToken, query: torch.Tensor, ids: torch.Tensor, scoring: Scoring
) -> AttentionResult:
    """Attention of ``query [B, Hq, Q, Dk]`` to what ``ids`` leave out, estimated.

    ``ids [B, Hkv or Hq, Q, K]`` are selected tokens, -1 for none. They are taken as the k largest
    of n scores that have a normal distribution, with mean m and standard deviation s. The others
    lie below its quantile z of (n - k) / n. Their exponentials sum up to
    ``n exp(m + s^2 / 2) Phi(z - s)``, and by these weights their mean is
    ``m + s (s - phi(z - s) / Phi(z - s))``. Values follow by their regression on the scores.
    With equal scores this is a mean token that counts n - k times.

    Returns ``out [B, Hq, Q, Dv]``, 0 where all are selected, and ``lse [B, Hq, Q]``, fp32.
    """
    score, variance, shared = mean.scores(query, scoring.scale, scoring.softcap)
    counts = mean.counts[:, None, None]
    share = (ids >= 0).sum(-1, keepdim=True) / counts.clamp(min=1)
    # A head of a group may select for itself.
    share = share.clamp_(max=1.0).unflatten(1, (mean.values.shape[1], -1))
    spread = variance.sqrt()
    bound = -torch.special.ndtri(share) - spread
    below = torch.special.log_ndtr(bound)
    lse = score + variance / 2 + counts.log().unsqueeze(-1) + below
    # phi / Phi, where neither underflows; logarithms in fp32 would lose it where scores spread.
    ratio = math.sqrt(2 / math.pi) / torch.special.erfcx(-bound * math.sqrt(0.5))
    out = mean.values.unsqueeze(2) + (1 - ratio / spread.clamp(min=_LEAST_SPREAD)) * shared
    return out.masked_fill(lse.isneginf(), 0.0).flatten(1, 2), lse.flatten(1, 2).squeeze(-1)


def _counted(block: TokenBlock, sink_slots: torch.Tensor | None) -> torch.Tensor | None:
    """``[B, n]`` bool, False for tokens that are not valid, or sinks; None: all are neither."""
    if sink_slots is None:
        return block.valid
    columns, length = sink_slots - block.start, len(block)
    # A column more, for sinks elsewhere.
    marks = block.keys.new_ones(len(columns), length + 1, dtype=torch.bool)
    if block.valid is not None:
        marks[:, :length] = block.valid
    outside = (columns < 0) | (columns >= length)
    return marks.scatter_(1, columns.masked_fill(outside, length), False)[:, :length]


def _mean(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``sums [B, Hkv, *, *]`` over ``counts [B, 1]``; of no tokens, as they are."""
    return sums / counts.clamp(min=1)[:, None, :, None]


def _sum(rows: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` fp64 of ``rows [..., n, D]``."""
    length = rows.shape[-2] // _CHUNK_LEN * _CHUNK_LEN
    late = rows[..., length:, :].sum(dim=-2, dtype=torch.float64)
    chunks = rows[..., :length, :].unflatten(-2, (-1, _CHUNK_LEN))
    return late + chunks.sum(dim=-2, dtype=torch.float32).sum(dim=-2, dtype=torch.float64)
