"""CachedRows: the keys or values of a layer as a tensor that is made when it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch.utils import _pytree as pytree

_TOKENS = 2

_NO_WRITING = (
    "{} would change keys or values of a retrieval cache, whose index knows them already: change a "
    "copy (layer.keys.clone()), or fill a new cache"
)


class CachedRows(torch.Tensor):
    """``[B, Hkv, n, D]``: the first ``n`` tokens of a layer, wherever they lie.

    A tensor for whoever looks at ``layer.keys`` as with transformers' own caches. Form, dtype and
    device cost nothing, and so does a prefix, ``rows[:, :, :m]``; any other operation gathers all
    rows first, on the device of the window. Nothing is written through it.

    Attributes:
        owner: the layer.
        read: ``count -> [B, Hkv, count, D]``, the first rows in the order of their slots.
    """

    owner: Any
    read: Callable[[int], torch.Tensor]

    @staticmethod
    def __new__(
        cls, owner: Any, read: Callable[[int], torch.Tensor], length: int, like: torch.Tensor
    ) -> Self:
        """``length`` rows with batch, heads, width, dtype and device of ``like [B, H, *, D]``."""
        batch, heads, _, width = like.shape
        rows: Self = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, length, width), dtype=like.dtype, device=like.device
        )
        rows.owner, rows.read = owner, read
        return rows

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CachedRows({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __setitem__(self, indices: Any, value: Any) -> None:
        raise TypeError(_NO_WRITING.format("assigning to a part"))

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """As of any tensor."""
        return _made(self).numpy(force=force)

    def tolist(self) -> list:
        """As of any tensor."""
        return _made(self).tolist()

    # Attributes and methods stay those of a tensor; only operations are looked at, below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = zip(func._schema.arguments, args, strict=False)
        written = [given for one, given in named if one.is_write]
        if any(isinstance(given, cls) for given in (*written, (kwargs or {}).get("out"))):
            raise TypeError(_NO_WRITING.format(func._schema.name.removeprefix("aten::")))
        rows = args[0] if args else None
        if isinstance(rows, cls):
            length = _prefix_len(func, args, rows)
            if length is not None:
                return cls(rows.owner, rows.read, length, rows)
        made = [pytree.tree_map_only(cls, _made, part) for part in (args, kwargs or {})]
        return func(*made[0], **made[1])


def _prefix_len(func: Any, args: tuple, rows: CachedRows) -> int | None:
    """How many of the first rows ``func`` gives, where it gives them and nothing else."""
    aten = torch.ops.aten
    if func in (aten.alias.default, aten.detach.default):
        return rows.shape[_TOKENS]
    if func is not aten.slice.Tensor:
        return None
    given: tuple[Any, ...] = args[1:]
    dim, start, end, step = given + (0, None, None, 1)[len(given) :]
    length = rows.shape[dim]
    first, last, _ = slice(start, end).indices(length)
    if first or step != 1:
        return None
    if dim % rows.ndim == _TOKENS:
        return max(last, 0)
    return rows.shape[_TOKENS] if last == length else None


def _made(rows: CachedRows) -> torch.Tensor:
    return rows.read(rows.shape[_TOKENS])


def prefix_of(layer: Any, name: str, rows: object) -> int:
    """How many tokens ``rows``, a prefix of ``layer``'s own keys or values, has.

    Raises:
        ValueError: it is something else; ``name`` is what it was to become.
    """
    if isinstance(rows, CachedRows) and rows.owner is layer:
        return rows.shape[_TOKENS]
    raise ValueError(
        f"layer.{name} of a retrieval cache can be set to a prefix of itself only, which crops: "
        f"layer.{name} = layer.{name}[:, :, :n]. To drop the newest tokens call "
        "cache.crop(-count), to choose rows of the batch cache.batch_select_indices(rows); other "
        "keys and values come by a forward pass through a new cache"
    )
