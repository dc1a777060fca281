"""Proxies: the rows that stand for keys in a layer's scores, in bf16 or in a byte a number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch

from hf_kvret.core.token_buffer import GrowingRows

DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
_MOST = 127.0
# In root mean squares, where int8 ends at the latest.
_WIDEST = 8.0


class Proxies:
    """``[B, F, n, r]`` rows, and for int8 the step of each column.

    Attributes:
        steps: ``[B, F, 1, r]`` fp32, what one unit of an int8 column is worth; None for bf16.
            Set by the rows that are made together; later ones outside the range are clamped.
    """

    def __init__(self, dtype: str) -> None:
        """``dtype``: a name in ``DTYPES``."""
        self.dtype = DTYPES[dtype]
        self.steps: torch.Tensor | None = None
        self._rows = GrowingRows()

    def __len__(self) -> int:
        return self._rows.length

    @property
    def rows(self) -> torch.Tensor:
        """View ``[B, F, n, r]``."""
        return self._rows.rows

    def replace(
        self,
        pieces: Iterable[torch.Tensor],
        spread: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
    ) -> None:
        """Start anew with ``pieces`` of fp32 rows, ``[B, F, *, r]`` each, at least one.

        ``spread [B, F, 1, r]``: root mean square of each column over the tokens that count. With
        it, int8 clamps what is far beyond, so that padding or a freak key doesn't coarsen all.
        ``kept [B]`` bool: batch rows that stay as they are.
        """
        old = None if kept is None else (self.rows, self.steps)
        # In bf16 meanwhile: what int8 saves in the end it doesn't need to save while it is made.
        rows = torch.cat([piece.bfloat16() for piece in pieces], dim=2)
        self._rows = GrowingRows()
        if self.dtype == torch.int8:
            largest = rows.float().nan_to_num_(nan=0.0).abs().amax(dim=2, keepdim=True)
            if spread is not None:
                largest = torch.minimum(largest, _WIDEST * spread)
            self.steps = largest.clamp(min=1e-30) / _MOST
        self.append(rows)
        if old is not None and kept is not None:
            chosen, (old_rows, old_steps) = kept[:, None, None, None], old
            self.rows.copy_(torch.where(chosen, old_rows, self.rows))
            if self.steps is not None and old_steps is not None:
                self.steps = torch.where(chosen, old_steps, self.steps)

    def append(self, rows: torch.Tensor) -> None:
        """Add ``rows [B, F, m, r]`` of any floating type."""
        if self.dtype == torch.int8:
            assert self.steps is not None
            rows = (rows.float() / self.steps).round_().clamp_(-_MOST, _MOST).nan_to_num_(nan=0.0)
        self._rows.append(rows.to(self.dtype))

    def weigh(self, query: torch.Tensor) -> torch.Tensor:
        """``query [B, F, *, r]`` fp32 so that plain inner products with the rows are scores."""
        return query if self.steps is None else query * self.steps

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Some of the rows, ``[B, F, *, r]``, as fp32 numbers."""
        return rows.float() if self.steps is None else rows.float() * self.steps

    def crop(self, length: int) -> None:
        """Keep the first ``length`` rows."""
        self._rows.crop(length)

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        self._rows.reorder(rows)
        if self.steps is not None:
            self.steps = self.steps.index_select(0, rows)

    def fork(self) -> Self:
        """A copy that shares rows until it appends."""
        twin = object.__new__(type(self))
        twin.dtype = self.dtype
        twin.steps, twin._rows = self.steps, self._rows.fork()
        return twin

    def nbytes(self) -> int:
        """Of rows and steps, spare room included."""
        return self._rows.nbytes() + (0 if self.steps is None else self.steps.nbytes)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that restore them; empty for none."""
        if not len(self):
            return {}
        steps = {} if self.steps is None else {"steps": self.steps}
        return {"rows": self.rows.contiguous(), **steps}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Become what was saved. KeyError names a missing tensor."""
        self._rows = GrowingRows()
        self._rows.append(state["rows"])
        self.steps = state["steps"] if self.dtype == torch.int8 else None
