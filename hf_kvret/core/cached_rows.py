"""CachedRows: the keys or values of a layer as a lazy tensor, gathered when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.utils import _pytree as pytree

_TOKENS = 2

_NO_WRITING = (
    "{} would change keys or values of a retrieval cache, which its index has already read: change "
    "a copy (layer.keys.clone()), or fill a new cache"
)


class CachedRows(torch.Tensor):
    """``[B, Hkv, n, D]``: the first ``n`` tokens of a layer, wherever they lie.

    It lets callers read ``layer.keys`` as with transformers' own caches. Shape, dtype and device
    are free, and so is a prefix, ``rows[:, :, :m]``. Any other operation, other slices included,
    first gathers all rows on the window's device and returns a plain tensor, a copy. Writing to it
    raises TypeError; reading it raises RuntimeError once the cache has dropped some of these tokens
    or rows of the batch.

    Attributes:
        source: where the rows come from.
    """

    source: RowSource

    @staticmethod
    def __new__(cls, source: RowSource, length: int) -> Self:
        """The first ``length`` rows of ``source``."""
        batch, heads, _, width = source.like.shape
        rows: Self = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, length, width), dtype=source.like.dtype, device=source.like.device
        )
        rows.source = source
        return rows

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CachedRows({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __setitem__(self, indices: Any, value: Any) -> None:
        raise TypeError(_NO_WRITING.format("assigning to a part"))

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        raise TypeError(_NO_WRITING.format("an assignment like +="))

    __isub__ = __imul__ = __itruediv__ = __ipow__ = __iadd__  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return _gather(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _gather(self).__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """As of any tensor."""
        return _gather(self).numpy(force=force)

    def tolist(self) -> list:
        """As of any tensor."""
        return _gather(self).tolist()

    # Attributes and methods stay those of a tensor; only operations are intercepted, below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        pairs = zip(func._schema.arguments, args, strict=False)
        outputs = [value for argument, value in pairs if argument.is_write]
        if any(isinstance(leaf, cls) for leaf in pytree.tree_leaves((outputs, _out(kwargs)))):
            raise TypeError(_NO_WRITING.format(func._schema.name.removeprefix("aten::")))
        rows = args[0] if args else None
        if isinstance(rows, cls):
            length = _prefix_len(func, args, rows)
            if length is not None:
                return cls(rows.source, length)
        plain = [pytree.tree_map_only(cls, _gather, part) for part in (args, kwargs or {})]
        return func(*plain[0], **plain[1])


@dataclass(frozen=True, eq=False)
class RowSource:
    """Keys or values of a layer, as they were when ``layer.keys`` was read.

    Attributes:
        owner: the layer.
        side: ``"keys"`` or ``"values"``.
        like: any ``[B, Hkv, *, D]`` with the sizes, dtype and device of the rows.
        read: ``(side, count) -> [B, Hkv, count, D]``, the layer's first ``count`` rows.
        current: ``count -> bool``, whether the layer still holds the same first ``count`` tokens.
    """

    owner: Any
    side: str
    like: torch.Tensor
    read: Callable[[str, int], torch.Tensor]
    current: Callable[[int], bool]


def _out(kwargs: dict[str, Any] | None) -> Any:
    return (kwargs or {}).get("out")


def _prefix_len(func: Any, args: tuple, rows: CachedRows) -> int | None:
    """Length of the prefix that ``func`` returns; None if it returns anything but a prefix."""
    aten = torch.ops.aten
    if func in (aten.alias.default, aten.detach.default):
        return rows.shape[_TOKENS]
    if func is not aten.slice.Tensor:
        return None
    bounds: tuple[Any, ...] = args[1:]
    dim, start, end, step = bounds + (0, None, None, 1)[len(bounds) :]
    length = rows.shape[dim]
    first, last, _ = slice(start, end).indices(length)
    if first or step != 1:
        return None
    if dim % rows.ndim == _TOKENS:
        return max(last, 0)
    return rows.shape[_TOKENS] if last == length else None


def _gather(rows: CachedRows) -> torch.Tensor:
    source, length = rows.source, rows.shape[_TOKENS]
    if not source.current(length):
        raise RuntimeError(
            f"the cache has dropped some of these {length} {source.side} since they were read: "
            f"read layer.{source.side} again"
        )
    return source.read(source.side, length)


def prefix_of(layer: Any, name: str, rows: object) -> int:
    """Length in tokens of ``rows``, which must be a prefix of ``layer``'s own keys or values.

    Raises:
        ValueError: anything else; ``name`` is the attribute that it was assigned to.
    """
    if isinstance(rows, CachedRows):
        source, length = rows.source, rows.shape[_TOKENS]
        if source.owner is layer and source.side == name and source.current(length):
            return length
    raise ValueError(
        f"layer.{name} of a retrieval cache can only be set to a prefix of itself, which crops: "
        f"layer.{name} = layer.{name}[:, :, :n]. To drop the newest tokens call "
        "cache.crop(-count), to choose rows of the batch cache.batch_select_indices(rows); for "
        "other keys and values run a forward pass with a new cache"
    )
