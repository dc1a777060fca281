"""TokenBuffer: rows of consecutive tokens, by slot, in memory that is allocated ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from hf_kvret.contracts.host_memory import empty
from hf_kvret.contracts.state import Field, PartField, State, Tensors, is_mapped

# Dropped rows at the front that may stay before the others are moved.
_SLACK = 256


class TokenBuffer(State):
    """Rows ``[B, H, n, *width]`` of the slots ``first .. end``.

    Tokens join at the end and are dropped at both sides. Capacity grows by a sixteenth of the
    length, at least ``least_step`` rows. A fork shares the memory until it appends, then it takes a
    copy. The original goes on in place, unless it was cropped below what a fork still reads.

    Attributes:
        first: slot of the first row.
    """

    def __init__(self, least_step: int = 256) -> None:
        self.least_step = least_step
        self.reset()

    def reset(self) -> None:
        self.first = 0
        # Rows of the memory: first and last in use, and up to where forks may read.
        self._begin = self._end = self._fork_end = 0
        self._memory: torch.Tensor | None = None
        self._owns_memory = True

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def is_allocated(self) -> bool:
        """Whether it has held rows, so that their shape is known."""
        return self._memory is not None

    @property
    def end(self) -> int:
        """Slot after the last row."""
        return self.first + len(self)

    @property
    def rows(self) -> torch.Tensor:
        """View ``[B, H, n, *width]``, to be read. RuntimeError before the first row."""
        if self._memory is None:
            raise RuntimeError("no rows yet: append first")
        return self._memory[:, :, self._begin : self._end]

    @property
    def rows_nbytes(self) -> int:
        """Bytes of ``rows``, spare room left out; 0 before the first row."""
        memory = self._memory
        return memory.nbytes // memory.shape[2] * len(self) if memory is not None and self else 0

    def since(self, slot: int) -> torch.Tensor:
        """View ``[B, H, *, *width]`` of the rows from ``slot`` on."""
        return self.rows[:, :, max(0, slot - self.first) :]

    def writable(self) -> torch.Tensor:
        """``rows``, to be written to: in memory that no fork reads."""
        if not self._owns_memory or self._fork_end:
            self._adopt(self.rows.clone())
        return self.rows

    def reserve(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Make room for ``count`` more rows and return the view ``[B, H, count, *width]`` of it.

        ``like`` is any tensor ``[B, H, *, *width]`` with the dtype, device and shape of rows.
        """
        memory = self._memory
        in_place = self._owns_memory and self._end >= self._fork_end
        if memory is None or not in_place or self._end + count > memory.shape[2]:
            length = len(self) + count
            # A multiple of 16, so that every head's rows begin where wide loads may.
            capacity = -(-(length + max(self.least_step, length // 16)) // 16) * 16
            larger = empty((*like.shape[:2], capacity, *like.shape[3:]), like.dtype, like.device)
            if memory is not None:
                larger[:, :, : len(self)] = self.rows
            self._adopt(larger)
            memory = larger
        start, self._end = self._end, self._end + count
        return memory[:, :, start : self._end]

    def append(self, rows: torch.Tensor) -> None:
        """Copy ``rows [B, H, count, *width]`` behind the others."""
        self.reserve(rows.shape[2], rows).copy_(rows)

    def take(self, rows: torch.Tensor) -> None:
        """Hold ``rows [B, H, n, *width]``, the first ones, where they lie, as in a file's mapping.

        Nothing is written to them: they are copied when others join.
        """
        self._adopt(rows)
        self._end, self._owns_memory = rows.shape[2], False

    def put(self, rows: torch.Tensor, start: int) -> None:
        """Copy ``rows`` to the slots from ``start`` on, in place of what was there and after it.

        Where ``start`` is not next to the rows, these are dropped.
        """
        if not self.first <= start <= self.end:
            self._end, self.first = self._begin, start
        self.crop(start)
        self.append(rows)

    def crop(self, length: int) -> None:
        """Forget the slots from ``length`` on."""
        self._end = min(self._end, self._begin + max(0, length - self.first))

    def drop(self, slot: int) -> None:
        """Forget the slots before ``slot``."""
        count = max(0, min(len(self), slot - self.first))
        self._begin += count
        self.first += count
        if self._begin > _SLACK:
            rows = self.rows
            self._adopt(rows[:, :, :0])
            self._end = 0
            self.append(rows)

    def reorder(self, rows: torch.Tensor) -> None:
        if self._memory is not None:
            begin, end = self._begin, self._end
            self._adopt(self._memory.index_select(0, rows))
            self._begin, self._end = begin, end

    def fork(self) -> Self:
        """A copy that shares the memory until it appends."""
        twin = copy.copy(self)
        twin._owns_memory, twin._fork_end = False, 0
        self._fork_end = max(self._fork_end, self._end)
        return twin

    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def state_dict(self) -> Tensors:
        """``rows`` and ``first``; empty before the first row."""
        if self._memory is None:
            return {}
        return {"rows": self.rows.contiguous(), "first": torch.tensor(self.first)}

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        self.reset()
        self.append(state["rows"].to(device))
        self.first = int(state["first"])

    def _adopt(self, memory: torch.Tensor) -> None:
        """Have ``memory``, of which the first ``len(self)`` rows are in use."""
        self._begin, self._end = 0, len(self)
        self._memory, self._owns_memory, self._fork_end = memory, True, 0


@dataclass(eq=False)
class TokensField(PartField):
    """A ``TokenBuffer`` of all cold tokens, from slot 0 on, saved as one tensor. A crop cuts it.

    Args:
        make: makes an empty one.
        may_be_empty: it may never have held rows where other fields were saved.
    """

    make: Callable[[], TokenBuffer] = TokenBuffer

    check = Field.check
    is_in = Field.is_in

    def to_save(self, value: Any) -> Tensors:
        return {self.key: value.rows.contiguous()} if value.is_allocated else {}

    def loaded(self, value: Any, state: Tensors, device: torch.device | None) -> Any:
        if self.key in state or not self.may_be_empty:
            rows = state[self.key].to(device)
            # A mapped tensor stays in its file. The caller may change any other, so it is copied.
            (value.take if is_mapped(rows) else value.append)(rows)
        return value


class PassedField(TokensField):
    """A ``TokenBuffer`` of tokens seen in forward passes, those in the window included.

    A crop leaves it as it is, because it does not say how many tokens stay in the window: ``put``,
    at the slot where the next pass starts, drops the others. Arguments as of ``TokensField``.
    """

    def crop(self, value: Any, length: int) -> None:
        """Nothing."""


# Declarations in the body of a class, as those of ``state``.
tokens: Callable[..., Any] = TokensField
passed: Callable[..., Any] = PassedField
