"""What stands for the cold tokens that a query does not select: their means, kept as sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.contracts.state import State, Tensors, number, tensor, transient
from hf_kvret.contracts.store import AttentionResult, BestResult
from hf_kvret_kernels.mean_tokens import BlockMeans
from hf_kvret_kernels.merge import merge_partials

# Cold slots of a sum, where one mean is made of all: what is read again after a crop, at most.
_BLOCK_LEN = 4096
# Rows that are added up in fp32 before fp64, and rows that are read from a store at once.
_CHUNK_LEN, _READ_LEN = 64, 4096


class BlockSums(State):
    """Sums of keys and values of the cold tokens that may be retrieved, by blocks of slots.

    In fp64, as there may be a million rows in a sum. What lags behind is made of the store's rows.

    Args:
        mean_len: cold slots of a mean; None: one mean of all tokens.
        key_dim: numbers of a key.
        value_dim: numbers of a value.
        value_in_key: values are the first numbers of keys.

    Attributes:
        end: slot after the last token that was added.
    """

    # [B, Hkv, blocks, Dk + Dv], or Dk where values are numbers of the keys.
    _sums: torch.Tensor | None = tensor(shared=True, dims="B H b w", dtype=torch.float64)
    # [B, blocks] int64.
    _counts: torch.Tensor | None = tensor(shared=True, dims="B b", dtype=torch.int64)
    end: int = number(0)
    # None: to be made of the sums.
    _means: BlockMeans | None = transient()

    def __init__(
        self, mean_len: int | None, key_dim: int, value_dim: int, value_in_key: bool = False
    ) -> None:
        self.mean_len = mean_len
        self._block_len = _BLOCK_LEN if mean_len is None else mean_len
        # Where the numbers of a key and of a value are in a sum.
        self._key = slice(key_dim)
        start = 0 if value_in_key else key_dim
        self._value = slice(start, start + value_dim)

    def add(self, block: TokenBlock, sink_slots: torch.Tensor | None = None) -> None:
        """Add the tokens from slot ``end`` on that are valid, and not in ``sink_slots [B, s]``."""
        if block.start != self.end:
            raise RuntimeError(f"tokens of slot {block.start} came, those of {self.end} were next")
        if not len(block):
            return
        sums, counts = self._added_up(block, _counted(block, sink_slots))
        if self._sums is not None and self._counts is not None:
            if self.end % self._block_len:
                # The last block goes on.
                sums[:, :, 0] += self._sums[:, :, -1]
                counts[:, 0] += self._counts[:, -1]
            whole = self.end // self._block_len
            sums = torch.cat([self._sums[:, :, :whole], sums], dim=2)
            counts = torch.cat([self._counts[:, :whole], counts], dim=1)
        self._sums, self._counts = sums, counts
        self.end, self._means = block.end, None

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
        """Forget tokens from slot ``length`` on, and those before it in its block."""
        if length >= self.end:
            return
        blocks = length // self._block_len
        self.end, self._means = blocks * self._block_len, None
        if self._sums is not None and self._counts is not None:
            self._sums, self._counts = self._sums[:, :, :blocks], self._counts[:, :blocks]

    def state_dict(self) -> Tensors:
        """As every state's, of a single mean: others are nearly as large as their rows.

        Nothing, too, where rows were infinite: such sums could not be loaded.
        """
        sums = self._sums
        if self.mean_len is not None or not self.end or sums is None or not sums.isfinite().all():
            return {}
        return super().state_dict()

    def nbytes(self) -> int:
        """As every state's, with the means."""
        return super().nbytes() + self.means_nbytes()

    def means_nbytes(self) -> int:
        """Bytes of the means as they are, which a step reads."""
        return 0 if self._means is None else self._means.keys.nbytes + self._means.values.nbytes

    def means(self) -> BlockMeans:
        """Means of what was added, which is a token or more."""
        if self._means is None:
            assert self._sums is not None and self._counts is not None, "nothing was added"
            sums, counts = self._sums, self._counts
            if self.mean_len is None:
                sums, counts = sums.sum(2, keepdim=True), counts.sum(1, keepdim=True)
            means = (sums / counts.clamp(min=1)[:, None, :, None]).float()
            keys, values = means[..., self._key], means[..., self._value]
            self._means = BlockMeans(keys, values, counts, self.mean_len)
        return self._means

    def _added_up(
        self, block: TokenBlock, counted: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums and counts of a block's tokens, by the blocks that they belong to."""
        tensors = [block.keys] if block.value_in_key else [block.keys, block.values]
        if counted is not None:
            tensors = [x.masked_fill(~counted[:, None, :, None], 0.0) for x in tensors]
        sums, counts = [], []
        # The first block may be a late part, those in the middle are whole.
        head = min(len(block), -block.start % self._block_len)
        middle = (len(block) - head) // self._block_len * self._block_len
        for first, last, length in (
            (0, head, head),
            (head, head + middle, self._block_len),
            (head + middle, len(block), len(block) - head - middle),
        ):
            if first == last:
                continue
            apart = [x[:, :, first:last].unflatten(2, (-1, length)) for x in tensors]
            sums.append(torch.cat([_sum(x) for x in apart], dim=-1))
            if counted is None:
                whole = torch.full((), length, device=block.keys.device)
                counts.append(whole.expand(len(block.keys), apart[0].shape[2]))
            else:
                counts.append(counted[:, first:last].unflatten(1, (-1, length)).sum(-1))
        return torch.cat(sums, dim=2), torch.cat(counts, dim=1)


@dataclass(frozen=True, eq=False)
class ColdTokensWithMeans(ColdTokens):
    """Cold tokens of which those that a query does not select count by their means."""

    means: BlockMeans

    @property
    def host_rows(self) -> None:
        """None: the compiled library knows no means."""

    def begin(self, query: torch.Tensor, ids: torch.Tensor) -> Callable[[], AttentionResult]:
        finish = super().begin(query, ids)
        return lambda: self._merged(query, *finish(), ids)[:2]

    def begin_with_best(
        self, query: torch.Tensor, candidates: torch.Tensor
    ) -> Callable[[], BestResult]:
        finish = super().begin_with_best(query, candidates)
        return lambda: self._merged(query, *finish())

    def _merged(
        self, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, ids: torch.Tensor
    ) -> BestResult:
        mean_out, mean_lse = self.means.attend(query, ids, self.scale, self.softcap)
        return *merge_partials([out, mean_out], [lse, mean_lse]), ids


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
    if not length:
        return late
    chunks = rows[..., :length, :].unflatten(-2, (-1, _CHUNK_LEN))
    return late + chunks.sum(dim=-2, dtype=torch.float32).sum(dim=-2, dtype=torch.float64)
