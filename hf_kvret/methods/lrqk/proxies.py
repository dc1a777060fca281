"""Proxies: rows that stand for keys in a layer's scores, in bf16 or in a byte an element."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from hf_kvret.contracts.state import State, tensor
from hf_kvret.contracts.token_buffer import TokenBuffer, tokens
from hf_kvret.methods.lrqk.factors import float_chunks

DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
_MOST = 127.0
# Largest range of int8, in root mean squares.
_WIDEST = 8.0


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
            ``replace``; rows appended later are clamped to the range.
    """

    steps: torch.Tensor | None = tensor(
        optional=True, shared=True, dims="B f 1 r", dtype=torch.float32
    )
    _rows: TokenBuffer = tokens(dims="B f N r", dtype=(torch.bfloat16, torch.int8))

    def __init__(self, dtype: str) -> None:
        """``dtype``: a name in ``DTYPES``."""
        self.dtype = DTYPES[dtype]

    def __len__(self) -> int:
        return len(self._rows)

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

        ``spread [B, F, 1, r]``: root mean square of each column over the valid tokens. With it,
        int8 clamps outliers, so that padding or a single key does not coarsen all.
        ``keep [B]`` bool: sequences that keep their old rows.
        """
        old = None if keep is None else (self.rows, self.steps)
        # bf16 in between: the steps of int8 need all rows first.
        rows = torch.cat([chunk.bfloat16() for chunk in chunks], dim=2)
        self._rows = TokenBuffer()
        if self.dtype == torch.int8:
            largest = rows.float().nan_to_num_(nan=0.0).abs().amax(dim=2, keepdim=True)
            if spread is not None:
                largest = torch.minimum(largest, _WIDEST * spread)
            self.steps = largest.clamp(min=1e-30) / _MOST
        self.append(rows)
        if old is not None and keep is not None:
            mask, (old_rows, old_steps) = keep[:, None, None, None], old
            self.rows.copy_(torch.where(mask, old_rows, self.rows))
            if self.steps is not None and old_steps is not None:
                self.steps = torch.where(mask, old_steps, self.steps)

    def append(self, rows: torch.Tensor) -> None:
        """Add ``rows [B, F, m, r]`` of any floating type."""
        if self.dtype == torch.int8:
            assert self.steps is not None
            rows = (rows.float() / self.steps).round_().clamp_(-_MOST, _MOST).nan_to_num_(nan=0.0)
        self._rows.append(rows.to(self.dtype))

    def weigh(self, query: torch.Tensor) -> torch.Tensor:
        """``query [B, F, *, r]`` fp32, scaled so that inner products with the rows are scores."""
        return query if self.steps is None else query * self.steps

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """The ``rows [B, F, *, r]`` of ``self.rows`` in fp32."""
        return rows.float() if self.steps is None else rows.float() * self.steps
