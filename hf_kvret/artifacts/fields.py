"""Checks of what an artifact is made of; each returns a copy that its caller owns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_kvret.saved.strict_json import plain_bytes

if TYPE_CHECKING:
    from hashlib import _Hash


def check_method(method: str) -> None:
    """ValueError unless ``method`` can be the name of one."""
    if not isinstance(method, str) or not re.fullmatch("[a-z][a-z0-9_-]*", method):
        raise ValueError(f"method={method!r}: the name of a method, small letters, digits, - and _")


def tensor_dict(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors in a new dict; ValueError or TypeError for what is no name or tensor."""
    if not isinstance(tensors, Mapping) or not tensors:
        raise ValueError("tensors: pass a dict with at least one tensor, by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name in ("", "__metadata__"):
            raise ValueError(f"tensors: {name!r} is no name for a tensor, take another")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors: {name} is a {type(tensor).__name__}, pass a torch.Tensor")
    return dict(tensors)


def add_tensors(digest: _Hash, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add names, dtypes, shapes and numbers to a digest, in the order of the names."""
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(plain_bytes([name, dtype, list(tensor.shape)]))
        numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(numbers.numpy().data)


def plain_json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """``value`` after a way through JSON, which knows no tuples and only strings as names.

    Raises:
        TypeError, ValueError: it is no dict, or holds what JSON can't, for instance NaN.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}: pass a dict of plain JSON")
    return _through_json(name, dict(value))


def plain_quality(quality: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of figures after a way through JSON.

    Raises:
        TypeError, ValueError: a row without ``layer``, or with anything but single figures.
    """
    rows = _through_json("quality", list(quality))
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("layer"), int):
            raise ValueError(f"quality[{number}]={row!r}: pass a dict with 'layer', its number")
        names = [name for name, value in row.items() if isinstance(value, dict | list)]
        if names:
            raise ValueError(
                f"quality[{number}]: {', '.join(names)} is no number, string or None; give each "
                "figure a name of its own"
            )
    return rows


def _through_json(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{name} is not plain JSON ({error}): pass dicts, lists, strings, finite numbers, "
            "booleans and None"
        ) from error
