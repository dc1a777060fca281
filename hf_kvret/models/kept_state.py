"""What a model keeps of a conversation outside the cache, and reads again in later passes.

transformers' models keep two things so: the shift of positions behind pictures (``rope_deltas`` of
vision types), and frequencies of rotary embeddings that grow with the text (dynamic NTK). They lie
on the model, which serves one conversation after another. ``tests/models/test_kept_state.py``
searches the sources of transformers for more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

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


class Kept(NamedTuple):
    """An attribute that a module of a model keeps.

    Attributes:
        name: of the value: path and attribute, the same for a model and for its base model.
        path: of the module in the model.
        attribute: its name on the module.
        origin: the module's attribute with the value of a fresh model; empty where that is None.
    """

    name: str
    path: str
    attribute: str
    origin: str


_kept: weakref.WeakKeyDictionary[nn.Module, tuple[Kept, ...]] = weakref.WeakKeyDictionary()


def kept(model: Any) -> tuple[Kept, ...]:
    """What ``model`` keeps between passes; empty for most text models. Searched once.

    Empty, too, for what is no module and yet has ``generate``, as of other runtimes.
    """
    if not isinstance(model, nn.Module):
        return ()
    result = _kept.get(model)
    if result is None:
        base = f"{getattr(model, 'base_model_prefix', '')}."
        result = _kept[model] = tuple(
            Kept(
                f"{path}.{attribute}".removeprefix(base).removeprefix("."), path, attribute, origin
            )
            for path, module in model.named_modules()
            for attribute, origin in _kept_by(module)
        )
    return result


def _kept_by(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The attributes that ``module`` keeps, each with that of a fresh model's value."""
    if hasattr(module, SHIFT):
        yield SHIFT, ""
    for prefix in _growing(module):
        yield f"{prefix}{FREQUENCIES}", f"{prefix}original_{FREQUENCIES}"
        yield f"{prefix}{LONGEST}", "original_max_seq_len"


def _growing(module: nn.Module) -> list[str]:
    """Prefixes of the frequencies that grow with the text; by type of layer where those differ."""
    types = getattr(module, "rope_type", None)
    if isinstance(types, str):
        types = {"": types}
    elif not isinstance(types, Mapping):
        return []
    prefixes = {f"{layer}_" if layer else "": rope for layer, rope in types.items()}
    return [prefix for prefix, rope in prefixes.items() if "dynamic" in str(rope)]


def grows(model: nn.Module) -> bool:
    """Whether ``model`` has rotary embeddings whose frequencies grow with the text."""
    return any(one.attribute != SHIFT for one in kept(model))


def take(model: nn.Module) -> dict[str, Any]:
    """What ``model`` keeps now, by name: the very values, not copies."""
    return {one.name: _value(model.get_submodule(one.path), one) for one in kept(model)}


def put(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Have ``model`` keep ``state``, which ``take`` gave; what that lacks becomes fresh.

    Raises:
        ValueError: a value that this model does not keep, or frequencies of another form.
    """
    unknown = state.keys() - {one.name for one in kept(model)}
    if unknown:
        raise ValueError(
            f"the cache was filled by a model that keeps {min(unknown)}, which "
            f"{type(model).__name__} does not: use it with the model that filled it"
        )
    for one in kept(model):
        module = model.get_submodule(one.path)
        origin = _origin(module, one)
        value = state.get(one.name, origin)
        if value is _value(module, one):
            continue
        if one.attribute.endswith(FREQUENCIES):
            if value.shape != origin.shape:
                raise ValueError(
                    f"the cache keeps {one.name} of shape {list(value.shape)}, "
                    f"{type(model).__name__} has {list(origin.shape)}: use it with the model that "
                    "filled it"
                )
            value = value.to(getattr(module, one.attribute).device)
        setattr(module, one.attribute, value)


def _value(module: nn.Module, one: Kept) -> Any:
    # Some attributes of single types of layers are first made when they grow.
    if hasattr(module, one.attribute):
        return getattr(module, one.attribute)
    return _origin(module, one)


def _origin(module: nn.Module, one: Kept) -> Any:
    return getattr(module, one.origin) if one.origin else None


def is_shift(name: str) -> bool:
    """Whether a kept value of that name has a row for each sequence."""
    return name.rpartition(".")[2] == SHIFT


def checked(name: str, value: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """A saved ``value``, if one of this name and form can be kept by a model.

    Args:
        name: as ``take`` gives it.
        value: a shift ``[rows, 1]``, or ``[rows, length + 1]`` by length of the text; frequencies
            ``[n]``; or a length without dimensions.
        rows: of the cache.
        length: tokens of the cache.

    Raises:
        ValueError: it can't.
    """
    attribute = name.rpartition(".")[2]
    if attribute == SHIFT:
        is_right = value.dtype == torch.int32 and list(value.shape) in (
            [rows, 1],
            [rows, length + 1],
        )
    elif attribute.endswith(FREQUENCIES):
        is_right = value.ndim == 1 and value.is_floating_point() and bool(value.isfinite().all())
    else:
        is_right = attribute.endswith(LONGEST) and value.dtype == torch.int64 and not value.ndim
    if not is_right:
        raise ValueError(
            f"model_state.{name[:80]} of {value.dtype} {list(value.shape)} is nothing that a model "
            "keeps: the file is damaged; save the cache again"
        )
    return value


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
