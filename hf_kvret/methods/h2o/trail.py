"""Trail and Scores: what is known of the tokens seen, by slot."""

from __future__ import annotations

from typing import Self

import torch

from hf_kvret.core.token_buffer import GrowingRows

# Rows dropped at the front that may wait before the others are moved.
_SLACK = 256


class Trail:
    """Rows ``[B, H, n, D]`` of consecutive slots: they join at the end and are dropped at both.

    Attributes:
        first: slot of the first row.
    """

    def __init__(self) -> None:
        self.first = 0
        self._rows = GrowingRows(64)
        self._gone = 0

    def __len__(self) -> int:
        return self._rows.length - self._gone

    @property
    def end(self) -> int:
        """Slot after the last row."""
        return self.first + len(self)

    @property
    def rows(self) -> torch.Tensor:
        """View ``[B, H, n, D]``. RuntimeError before the first ``add``."""
        return self._rows.rows[:, :, self._gone :]

    def since(self, slot: int) -> torch.Tensor:
        """View ``[B, H, *, D]`` of the rows from ``slot`` on."""
        return self.rows[:, :, max(0, slot - self.first) :]

    def add(self, rows: torch.Tensor, start: int) -> None:
        """Copy ``rows [B, H, n, D]`` of the slots from ``start`` on, in place of what was there."""
        kept = max(0, min(len(self), start - self.first))
        self._rows.crop(self._gone + kept)
        self.first = start - kept
        self._rows.append(rows)

    def drop(self, before: int) -> None:
        """Forget the slots below ``before``."""
        count = max(0, min(len(self), before - self.first))
        self._gone += count
        self.first += count
        if self._gone > _SLACK:
            moved = GrowingRows(64)
            moved.append(self.rows)
            self._rows, self._gone = moved, 0

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        self._rows.reorder(rows)

    def fork(self) -> Self:
        """A copy that shares the rows until it adds some."""
        twin = type(self)()
        twin.first, twin._gone, twin._rows = self.first, self._gone, self._rows.fork()
        return twin

    def nbytes(self) -> int:
        """Bytes of the buffer, spare capacity included."""
        return self._rows.nbytes()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that restore it. RuntimeError before the first ``add``."""
        return {"rows": self.rows.contiguous(), "first": torch.tensor(self.first)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Become what was saved. KeyError names a missing tensor."""
        self._rows, self._gone = GrowingRows(64), 0
        self._rows.append(state["rows"])
        self.first = int(state["first"])


class Scores:
    """Attention that each token gathered, ``[B, Hkv, T]`` fp32; -inf once it is evicted.

    Forks share it until either side writes.
    """

    def __init__(self) -> None:
        self._rows = GrowingRows()
        self._shared = False

    def __len__(self) -> int:
        return self._rows.length

    @property
    def all(self) -> torch.Tensor:
        """View ``[B, Hkv, T]``, to be read only. RuntimeError before the first token."""
        return self._rows.rows

    def start(self, tokens: torch.Tensor, slot: int) -> None:
        """Forget all from ``slot`` on, then take in ``tokens [B, Hkv, n, D]`` with nothing yet."""
        self._rows.crop(slot)
        self._rows.append(torch.zeros(tokens.shape[:3], device=tokens.device))

    def add(self, slot: int, weights: torch.Tensor) -> None:
        """Add ``weights [B, Hkv, n]`` to the tokens from ``slot`` on."""
        self._own()
        self._rows.rows[:, :, slot : slot + weights.shape[2]] += weights

    def add_at(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Add ``weights [B, Hkv, m]`` to the tokens ``ids [B, Hkv, m]``; -1 for none."""
        self._own()
        weights = weights.masked_fill(ids < 0, 0.0)
        self._rows.rows.scatter_add_(2, ids.long().clamp(min=0), weights)

    def evict(self, tokens: torch.Tensor) -> None:
        """Give up ``tokens [B, Hkv, n]`` bool among the first n, for good."""
        self._own()
        self._rows.rows[:, :, : tokens.shape[2]].masked_fill_(tokens, float("-inf"))

    def reorder(self, rows: torch.Tensor) -> None:
        """Batch row b becomes the old row ``rows[b]``."""
        self._rows.reorder(rows)
        self._shared = False

    def fork(self) -> Self:
        """A copy that shares the numbers until either side writes."""
        twin = type(self)()
        twin._rows, twin._shared = self._rows.fork(), True
        self._shared = True
        return twin

    def nbytes(self) -> int:
        """Bytes of the buffer, spare capacity included."""
        return self._rows.nbytes()

    def load(self, scores: torch.Tensor) -> None:
        """Become ``scores [B, Hkv, T]``, which are copied."""
        self._rows, self._shared = GrowingRows(), False
        self._rows.append(scores)

    def _own(self) -> None:
        if self._shared:
            self.load(self._rows.rows)
