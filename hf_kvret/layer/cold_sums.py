"""What stands for the cold tokens that a query does not select: their mean and covariance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.contracts.state import State, Tensors, number, tensor, transient
from hf_kvret.layer.window import Window
from hf_kvret_kernels.mean_tokens import MeanToken

# Rows that are added up in fp32 before fp64, and rows that are read from a store at once.
_CHUNK_LEN, _READ_LEN = 64, 1024


class ColdSums(State):
    """Sums of keys and values of the cold tokens that may be retrieved, and of their products.

    In fp64, as there may be a million rows in a sum; products are of rows less their mean. What
    lags behind is made of the store's rows.

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

    @classmethod
    def of(cls, window: Window) -> Self:
        """Empty sums of tokens like those in ``window``."""
        dims = window.keys.shape[-1], window.values.shape[-1]
        return cls(*dims, bool(window.value_in_key))

    def counts_as_many_as(self, shown: torch.Tensor) -> bool:
        """Whether as many tokens count as are ``shown [B, n]`` before ``end``; reads the device.

        It doesn't tell whether they are the same tokens.
        """
        counts = self._counts
        return counts is None or torch.equal(counts[:, 0], shown[:, : self.end].sum(1))

    def add(self, block: TokenBlock, sink_slots: torch.Tensor | None = None) -> None:
        """Add the tokens from slot ``end`` on that are valid, and not in ``sink_slots [B, s]``."""
        assert block.start == self.end, "tokens come in order"
        for rows, counted in _parts(block, _counted(block, sink_slots)):
            self._combine(*_sums_of(rows, counted, self._key))
        self.end, self._mean = block.end, None

    def _combine(
        self, sums: torch.Tensor, counts: torch.Tensor, products: torch.Tensor, sign: int = 1
    ) -> None:
        """Add the sums of other tokens, or take them off with ``sign=-1``."""
        if self._sums is None or self._counts is None or self._products is None:
            self._sums, self._counts, self._products = sums, counts, products
            return
        total = self._counts + sign * counts
        # The means of both parts differ, which adds the product of the difference.
        apart = _mean(sums, counts) - _mean(self._sums, self._counts)
        weight = sign * counts.double() * self._counts / total.clamp(min=1)
        shift = weight[:, None, :, None] * (apart[..., self._key].mT @ apart)
        self._products = self._products + sign * products + shift
        self._sums, self._counts = self._sums + sign * sums, total

    def catch_up(self, cold: ColdTokens, heads: int, value_in_key: int) -> None:
        """Add what is missing of ``cold``, of ``heads`` KV heads, as the store reads it back."""
        for block in _read(cold, self.end, len(cold), heads, value_in_key):
            self.add(block)

    def crop(self, length: int) -> None:
        """Forget everything where tokens are dropped that were added."""
        if length < self.end:
            self.reset()

    def drop(self, cold: ColdTokens | None, length: int, heads: int, value_in_key: int) -> None:
        """Forget the tokens from slot ``length`` on, which ``cold`` has still.

        They are taken off. All is forgotten where they are more than what stays, which is then
        read again, where numbers are not finite, and with None, as nobody knows which are padding.
        """
        if cold is None or self.end - length > length:
            self.crop(length)
            return
        for block in _read(cold, length, self.end, heads, value_in_key):
            for rows, counted in _parts(block, block.valid):
                self._combine(*_sums_of(rows, counted, self._key), sign=-1)
        self.end, self._mean = min(length, self.end), None
        if self._products is not None and not bool(self._products.isfinite().all()):
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


def _read(
    cold: ColdTokens, start: int, end: int, heads: int, value_in_key: int
) -> Iterator[TokenBlock]:
    """The tokens from slot ``start`` to ``end``, as the store reads them back."""
    for first in range(start, end, _READ_LEN):
        stop = min(end, first + _READ_LEN)
        device = cold.valid.device
        slots = torch.arange(first, stop, dtype=torch.int32, device=device)
        ids = slots.expand(len(cold.valid), heads, 1, -1).contiguous()
        keys, values = (rows[:, :, 0].to(device) for rows in cold.store.gather(ids))
        valid = cold.valid[:, first:stop]
        yield TokenBlock(keys, values, first, valid, value_in_key=value_in_key)


def _parts(
    block: TokenBlock, counted: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Rows ``[B, Hkv, n, w]`` fp32 of a block, and which are ``counted [B, n]``; None: all."""
    sides = [block.keys] if block.value_in_key else [block.keys, block.values]
    for start in range(0, len(block), _READ_LEN):
        some = slice(start, start + _READ_LEN)
        rows = torch.cat([x[:, :, some].float() for x in sides], dim=-1)
        yield rows, None if counted is None else counted[:, some]


def _sums_of(
    rows: torch.Tensor, counted: torch.Tensor | None, key: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums, counts and products of ``rows [B, Hkv, n, w]``, which are written to."""
    if counted is None:
        counts = torch.full((len(rows), 1), rows.shape[2], device=rows.device)
    else:
        counts, left_out = counted.sum(1, keepdim=True), ~counted[:, None, :, None]
        rows.masked_fill_(left_out, 0.0)
    sums = _sum(rows).unsqueeze(2)
    # In place: in memory that is new each page would be made first.
    rows -= _mean(sums, counts).float()
    if counted is not None:
        rows.masked_fill_(left_out, 0.0)
    return sums, counts, (rows[..., key].mT @ rows).double()


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
