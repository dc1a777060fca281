"""What a model keeps of a conversation outside the layers of a cache, and ModelState, its record.

transformers' models keep two things so: the shift of positions behind pictures (``rope_deltas`` of
vision types), and frequencies of rotary embeddings that grow with the text (dynamic NTK). They lie
on the model, which serves one conversation after another. ``tests/models/test_kept_state.py``
searches the sources of transformers for more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_kvret.contracts.state import Field, State, Tensors, number, tensor

UNKNOWN = torch.iinfo(torch.int32).min
"""In place of a shift: a cut there goes through a picture, and text has no position behind it."""

SHIFT = "rope_deltas"
"""``[B, 1]`` int64, or None: the highest position of a text, plus one, minus its tokens.

Vision models number the tokens of a picture by its rows and columns, so that text behind it goes on
from a position that is not the count of tokens."""

FREQUENCIES = "inv_freq"
"""``[D / 2]`` floats: the frequencies that a rotary embedding rotates by."""

LONGEST = "max_seq_len_cached"
"""The length of text that the frequencies are for: a number, or a tensor without dimensions."""

# The last three axes of positions are time, height and width.
_SHIFT_AXES = 3


class Attribute(NamedTuple):
    """An attribute that a module of a model keeps.

    Attributes:
        name: of the value: path and attribute, the same for a model and for its base model.
        path: of the module in the model.
        attribute: its name on the module.
        initial: the module's attribute with the value of a fresh model; empty where that is None.
    """

    name: str
    path: str
    attribute: str
    initial: str


_found: weakref.WeakKeyDictionary[nn.Module, tuple[Attribute, ...]] = weakref.WeakKeyDictionary()


def stateful_attributes(model: Any) -> tuple[Attribute, ...]:
    """What ``model`` keeps between passes; empty for most text models. Searched once.

    Empty, too, for what is no module and yet has ``generate``, as of other runtimes.
    """
    if not isinstance(model, nn.Module):
        return ()
    result = _found.get(model)
    if result is None:
        base = f"{getattr(model, 'base_model_prefix', '')}."
        result = _found[model] = tuple(
            Attribute(
                f"{path}.{attribute}".removeprefix(base).removeprefix("."), path, attribute, initial
            )
            for path, module in model.named_modules()
            for attribute, initial in _attributes_of(module)
        )
    return result


def _attributes_of(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The attributes that ``module`` keeps, each with that of a fresh model's value."""
    if hasattr(module, SHIFT):
        yield SHIFT, ""
    types = getattr(module, "rope_type", None)
    # By type of layer where those differ.
    types = {"": types} if isinstance(types, str) else types
    for layer, rope in types.items() if isinstance(types, Mapping) else ():
        if "dynamic" in str(rope):
            # These frequencies grow with the text.
            prefix = f"{layer}_" if layer else ""
            yield f"{prefix}{FREQUENCIES}", f"{prefix}original_{FREQUENCIES}"
            yield f"{prefix}{LONGEST}", "original_max_seq_len"


def grows(model: nn.Module) -> bool:
    """Whether ``model`` has rotary embeddings whose frequencies grow with the text."""
    return any(one.attribute != SHIFT for one in stateful_attributes(model))


def read_state(model: nn.Module) -> dict[str, Any]:
    """What ``model`` keeps now, by name: the very values, not copies."""
    attributes = stateful_attributes(model)
    return {one.name: _value(model.get_submodule(one.path), one) for one in attributes}


def write_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Have ``model`` keep ``state``, which ``read_state`` gave; what that lacks becomes fresh."""
    for one in stateful_attributes(model):
        module = model.get_submodule(one.path)
        initial = getattr(module, one.initial) if one.initial else None
        value = state.get(one.name, initial)
        if value is _value(module, one):
            continue
        if one.attribute.endswith(FREQUENCIES):
            value = value.to(getattr(module, one.attribute).device)
        setattr(module, one.attribute, value)


def _value(module: nn.Module, one: Attribute) -> Any:
    # Some attributes of single types of layers are first made when they grow.
    if hasattr(module, one.attribute):
        return getattr(module, one.attribute)
    return getattr(module, one.initial) if one.initial else None


def is_shift(name: str) -> bool:
    """Whether a kept value of that name has a row for each sequence."""
    return name.rpartition(".")[2] == SHIFT


def shifts(
    positions: torch.Tensor,
    mask: torch.Tensor | None,
    start: int,
    before: torch.Tensor | None,
    rows: int,
) -> torch.Tensor:
    """The shift by length to which a text may be cut, from ``start`` on: ``[rows, n + 1]`` int32.

    The result is on the device of ``positions``. Nothing is read on the host.

    Args:
        positions: of ``n`` tokens: ``[B, n]``, or ``[axes, B, n]``, of which the last three count;
            ``B`` is ``rows`` or 1.
        mask: ``[rows, start + n]``, 0 for padding; None where there is none.
        start: tokens before these.
        before: ``[rows, 1]``, the shift before them; None for 0.
        rows: of the batch.
    """
    axes = (positions if positions.ndim == 3 else positions[None])[-_SHIFT_AXES:].long()
    axes = axes.expand(-1, rows, -1)
    end = start + axes.shape[2]
    if mask is None:
        valid = torch.ones(rows, end, dtype=torch.bool, device=axes.device)
    else:
        valid = (mask != 0).to(axes.device)
    # Tokens of a sequence before each index from `start` on, and in all.
    tokens = torch.nn.functional.pad(valid.cumsum(1), (1, 0))[:, start:]
    valid = valid[:, start:]
    first = tokens[:, :1] - 1 + (0 if before is None else before.to(axes.device))
    # The highest position before each token, and in all.
    highest = torch.cat([first, torch.where(valid, axes.amax(0), first)], 1).cummax(1).values
    lowest = axes.amin(0)
    inside = valid & ((lowest <= highest[:, :-1]) | (lowest != axes.amax(0)))
    result = highest + 1 - tokens
    # The first token that a cut takes away tells where the next one would stand.
    result[:, :-1] = torch.where(valid, lowest - tokens[:, :-1], result[:, :-1])
    result[:, :-1].masked_fill_(inside, UNKNOWN)
    return result.to(torch.int32)


@dataclass(eq=False, kw_only=True)
class _ValuesField(Field):
    """What a model keeps, by name; only a shift has a row for each sequence."""

    saved: bool = False

    def initial(self) -> dict[str, Any]:
        return {}

    def reordered(self, value: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
        return {
            name: x.index_select(0, rows.to(x.device)) if is_shift(name) and x is not None else x
            for name, x in value.items()
        }

    def forked(self, value: dict[str, Any]) -> dict[str, Any]:
        return dict(value)


_kept_values: Callable[..., Any] = _ValuesField


class ModelState(State):
    """What the model of a cache keeps beside its layers.

    The shift of positions belongs to a length: a crop brings back that of the text that is left.
    Frequencies are those of the longest text that the cache held since it was empty, as they would
    be on a model that serves this conversation alone. Tensors are never written in place.
    """

    _values: dict[str, Any] = _kept_values()
    # `[B, n + 1]` int32 by length, up to the last pass that changed the shift.
    _shifts: torch.Tensor | None = tensor(shared=True, saved=False)
    _was_cut: bool = number(False, saved=False)

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

    def record(
        self, values: Mapping[str, Any], start: int, end: int, rows: int, cuts: torch.Tensor | None
    ) -> None:
        """Record what the model keeps after a pass.

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
                # `generate` repeats rows after it prepared their positions.
                value = value.repeat_interleave(rows // len(value), 0)
                inside = value.new_full((rows, end - start - 1), UNKNOWN, dtype=torch.int32)
                if cuts is not None:
                    # Positions that end with another shift than the model's own tell nothing.
                    cuts = cuts.to(value.device)
                    agrees = (cuts[:, -1:] == value).all()
                    inside = torch.where(agrees, cuts[:, 1:-1], inside)
                before = self._shifts
                if before is None:
                    # 0 where the shift never changed.
                    before = value.new_zeros(rows, 1, dtype=torch.int32)
                behind = before[:, -1:].expand(-1, max(0, start + 1 - before.shape[1]))
                before = torch.cat([before, behind], dim=1)[:, : start + 1].to(value.device)
                self._shifts = torch.cat([before, inside, value.to(torch.int32)], dim=1)
            self._values[name] = value

    def crop(self, length: int) -> None:
        """Go back to what was kept when the cache held ``length`` tokens."""
        if not length:
            self.reset()
        elif self._shifts is not None and length + 1 < self._shifts.shape[1]:
            self._shifts = self._shifts[:, : length + 1]
            for name, value in self._values.items():
                if is_shift(name) and value is not None:
                    self._values[name] = self._shifts[:, -1:].to(value)
            self._was_cut = True

    def state_dict(self) -> Tensors:
        """By the values' names; a shift is ``[B, n + 1]`` by length, the last one at the end."""
        tensors = {name: value for name, value in self._values.items() if value is not None}
        shifts = {name: self._shifts for name in tensors if is_shift(name)}
        return {name: torch.as_tensor(x) for name, x in (tensors | shifts).items()}

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        self.reset()
        for name, saved in state.items():
            value: Any = saved.to(device)
            if is_shift(name):
                self._shifts, self._was_cut = value, True
                value = value[:, -1:].long()
            self._values[name] = int(value) if name.endswith(LONGEST) else value
