"""ModelState: what a model kept of the conversation in a cache, outside of its layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch

from hf_kvret.models.kept_state import LONGEST, UNKNOWN, checked, is_shift


class _ShiftedPass(NamedTuple):
    """A pass that changed the shift of positions, as one with a picture does.

    Attributes:
        start: tokens before it.
        end: tokens after it.
        cuts: ``[B, end - start + 1]``, the shift for each length between; None if unknown.
        shift: ``[B, 1]``, after it.
    """

    start: int
    end: int
    cuts: torch.Tensor | None
    shift: torch.Tensor

    def rows(self, rows: torch.Tensor) -> _ShiftedPass:
        """The same with row b as the old row ``rows[b]``."""
        cuts = None if self.cuts is None else _rows(self.cuts, rows)
        return self._replace(cuts=cuts, shift=_rows(self.shift, rows))

    def at(self, length: int) -> torch.Tensor:
        """The shift ``[B, 1]`` of a text cut to ``length`` in or behind the pass."""
        if length >= self.end:
            return self.shift
        if self.cuts is None or not self.agrees():
            return torch.full_like(self.shift, UNKNOWN)
        return self.cuts[:, length - self.start, None].to(self.shift)

    def agrees(self) -> bool:
        """Whether the positions ended with the model's own shift: others tell nothing."""
        return self.cuts is not None and bool(
            (self.cuts[:, -1:].to(self.shift) == self.shift).all()
        )

    def cropped(self, length: int) -> _ShiftedPass:
        """The part before ``length``."""
        cuts = None if self.cuts is None else self.cuts[:, : length - self.start + 1]
        return _ShiftedPass(self.start, min(length, self.end), cuts, self.at(length))


class ModelState:
    """What the model of a cache keeps beside it; see ``hf_kvret.models.kept_state``.

    The shift of positions belongs to a length: a crop brings back that of the text that is left.
    Frequencies are those of the longest text that the cache held since it was empty, as they would
    be on a model that serves this conversation alone.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: an empty cache has the state of a fresh model."""
        self._values: dict[str, Any] = {}
        self._passes: list[_ShiftedPass] = []
        self._was_cut = False

    @property
    def shift(self) -> torch.Tensor | None:
        """The shift ``[B, 1]`` behind the last token; None while there was no picture."""
        return next((value for name, value in self._values.items() if is_shift(name)), None)

    def values(self) -> dict[str, Any]:
        """What the model must keep for the next pass, by name; not to be changed.

        Raises:
            ValueError: the cache was cut in the middle of a picture.
        """
        if self._was_cut:
            shift = self.shift
            if shift is not None and bool((shift == UNKNOWN).any()):
                raise ValueError(
                    "the cache was cropped in the middle of a picture, or to a length whose "
                    "positions it does not know: crop it to a place before the picture, or pass "
                    "the whole conversation to a new cache"
                )
            self._was_cut = False
        return self._values

    def changed(self, values: Mapping[str, Any]) -> bool:
        """Whether a pass has left another shift than there was."""
        return any(
            is_shift(name) and value is not self._values.get(name) for name, value in values.items()
        )

    def note(
        self, values: Mapping[str, Any], start: int, end: int, rows: int, cuts: torch.Tensor | None
    ) -> None:
        """Note what the model keeps after a pass.

        Args:
            values: by name.
            start: tokens before the pass.
            end: tokens after it.
            rows: of the batch; a shift of fewer rows is repeated.
            cuts: ``[B, end - start + 1]``, the shift by length; None if unknown.
        """
        for name, value in values.items():
            if value is self._values.get(name):
                continue
            if is_shift(name) and value is not None:
                value = _repeated(value, rows)
                self._passes.append(_ShiftedPass(start, end, cuts, value))
            self._values[name] = value

    def reorder(self, rows: torch.Tensor) -> None:
        """Row b of the batch becomes the old row ``rows[b]``; ``rows`` may repeat or omit rows."""
        self._passes = [one.rows(rows) for one in self._passes]
        for name, value in self._values.items():
            if is_shift(name) and value is not None:
                self._values[name] = _rows(value, rows)

    def repeat(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        if self.shift is not None:
            rows = torch.arange(len(self.shift), device=self.shift.device)
            self.reorder(rows.repeat_interleave(repeats))

    def crop(self, length: int) -> None:
        """Go back to what was kept when the cache held ``length`` tokens."""
        if not length:
            self.reset()
        elif self._passes and length < self._passes[-1].end:
            self._passes = [one.cropped(length) for one in self._passes if one.start < length]
            for name, value in self._values.items():
                if is_shift(name) and value is not None:
                    # A text without pictures has a shift of 0.
                    zero = torch.zeros_like(value)
                    self._values[name] = self._passes[-1].shift if self._passes else zero
            self._was_cut = True

    def fork(self) -> Self:
        """An independent copy, which shares the tensors."""
        twin = copy.copy(self)
        twin._values, twin._passes = dict(self._values), list(self._passes)
        return twin

    def state_dict(self, length: int) -> dict[str, torch.Tensor]:
        """CPU tensors that restore it, by name, of a cache of ``length`` tokens."""
        tensors = {
            name: self._table(value, length) if is_shift(name) else torch.as_tensor(value)
            for name, value in self._values.items()
            if value is not None
        }
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def _table(self, shift: torch.Tensor, length: int) -> torch.Tensor:
        """The shift for each length, ``[B, length + 1]`` int32; ``[B, 1]`` where all are 0."""
        table = torch.zeros(len(shift), length + 1, dtype=torch.int32)
        for one in self._passes:
            table[:, one.start + 1 : one.end] = UNKNOWN
            if one.cuts is not None and one.agrees():
                table[:, one.start : one.end + 1] = one.cuts
            table[:, one.end :] = one.shift
        return table if bool(table.any()) else table[:, :1]

    def load_state_dict(
        self, tensors: Mapping[str, torch.Tensor], rows: int, length: int, device: torch.device
    ) -> None:
        """The inverse of ``state_dict``, for a cache of ``rows`` with ``length`` tokens.

        Raises:
            ValueError: a name or a form that no model keeps.
        """
        self.reset()
        for name, tensor in tensors.items():
            value = checked(name, tensor, rows, length).to(device)
            if is_shift(name):
                self._values[name] = value[:, -1:].long()
                if value.shape[1] > 1:
                    self._passes = [_ShiftedPass(0, length, value, self._values[name])]
                    self._was_cut = True
            else:
                self._values[name] = int(value) if name.endswith(LONGEST) else value


def _rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return tensor[rows.to(tensor.device)]


def _repeated(shift: torch.Tensor, rows: int) -> torch.Tensor:
    """``shift`` with a row for each sequence: ``generate`` repeats rows after it."""
    return shift if len(shift) == rows else shift.repeat_interleave(rows // len(shift), 0)
