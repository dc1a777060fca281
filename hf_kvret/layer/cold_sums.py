"""What stands for the cold tokens that a query does not select: their mean, kept as a sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.contracts.state import State, Tensors, number, tensor, transient
from hf_kvret.contracts.store import AttentionResult
from hf_kvret_kernels.mean_tokens import MeanToken
from hf_kvret_kernels.merge import merge_partials

# Rows that are added up in fp32 before fp64, and rows that are read from a store at once.
_CHUNK_LEN, _READ_LEN = 64, 4096


class ColdSums(State):
    """Sums of keys and values of the cold tokens that may be retrieved.

    In fp64, as there may be a million rows in a sum. What lags behind is made of the store's rows,
    and so is all of it after a crop.

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
        if not len(block):
            return
        rows = [block.keys] if block.value_in_key else [block.keys, block.values]
        counted = _counted(block, sink_slots)
        if counted is None:
            counts = torch.full((len(block.keys), 1), len(block), device=block.keys.device)
        else:
            counts = counted.sum(1, keepdim=True)
            rows = [x.masked_fill(~counted[:, None, :, None], 0.0) for x in rows]
        sums = torch.cat([_sum(x) for x in rows], dim=-1).unsqueeze(2)
        if self._sums is not None and self._counts is not None:
            sums, counts = sums + self._sums, counts + self._counts
        self._sums, self._counts = sums, counts
        self.end, self._mean = block.end, None

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
        finite = self._sums is not None and bool(self._sums.isfinite().all())
        return super().state_dict() if finite else {}

    def nbytes(self) -> int:
        """As every state's, with the mean."""
        return super().nbytes() + self.mean_nbytes()

    def mean_nbytes(self) -> int:
        """Bytes of the mean as it is, which a step reads."""
        return 0 if self._mean is None else self._mean.keys.nbytes + self._mean.values.nbytes

    def mean(self) -> MeanToken:
        """The mean of what was added, which is a token or more."""
        if self._mean is None:
            assert self._sums is not None and self._counts is not None, "nothing was added"
            mean = (self._sums / self._counts.clamp(min=1)[:, None, :, None]).float()
            self._mean = MeanToken(mean[..., self._key], mean[..., self._value], self._counts)
        return self._mean


@dataclass(frozen=True, eq=False)
class ColdTokensWithMean(ColdTokens):
    """Cold tokens of which those that a query does not select count by their mean."""

    mean: MeanToken

    @property
    def host_rows(self) -> None:
        """None: the compiled library knows no mean."""

    def begin(self, query: torch.Tensor, ids: torch.Tensor) -> Callable[[], AttentionResult]:
        finish = super().begin(query, ids)

        def merged() -> AttentionResult:
            out, lse = finish()
            mean_out, mean_lse = self.mean.attend(query, ids, self.scale, self.softcap)
            return merge_partials([out, mean_out], [lse, mean_lse])

        return merged


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


def _sum(rows: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` fp64 of ``rows [..., n, D]``."""
    length = rows.shape[-2] // _CHUNK_LEN * _CHUNK_LEN
    late = rows[..., length:, :].sum(dim=-2, dtype=torch.float64)
    chunks = rows[..., :length, :].unflatten(-2, (-1, _CHUNK_LEN))
    return late + chunks.sum(dim=-2, dtype=torch.float32).sum(dim=-2, dtype=torch.float64)
