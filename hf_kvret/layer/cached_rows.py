"""CachedRows: the keys or values of a layer as a lazy tensor, gathered when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch.utils import _pytree as pytree

_NO_WRITING = (
    "{} would change keys or values of a retrieval cache, which its index has already read: change "
    "a copy (layer.keys.clone()), or fill a new cache"
)


class CachedRows(torch.Tensor):
    """``[B, Hkv, T, D]``: keys or values of a layer, wherever they lie.

    It lets callers read ``layer.keys`` as with transformers' own caches. Shape, dtype and device
    are free. Any operation first gathers all rows on the window's device and returns a plain
    tensor, a copy. Writing to it raises TypeError.

    Attributes:
        read: returns the rows as a plain tensor, or raises what a reader of them must know.
    """

    read: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(cls, like: torch.Tensor, length: int, read: Callable[[], torch.Tensor]) -> Self:
        """``length`` rows with the sizes, dtype and device of ``like [B, Hkv, *, D]``."""
        batch, heads, _, width = like.shape
        rows: Self = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, length, width), dtype=like.dtype, device=like.device
        )
        rows.read = read
        return rows

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CachedRows({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __setitem__(self, indices: Any, value: Any) -> None:
        raise TypeError(_NO_WRITING.format("assigning to a part"))

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        raise TypeError(_NO_WRITING.format("an assignment like +="))

    __isub__ = __imul__ = __itruediv__ = __ipow__ = __iadd__  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.read()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """As of any tensor."""
        return self.read().numpy(force=force)

    def tolist(self) -> list:
        """As of any tensor."""
        return self.read().tolist()

    # Attributes and methods stay those of a tensor; only operations are intercepted, below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        pairs = zip(func._schema.arguments, args, strict=False)
        outputs = [value for argument, value in pairs if argument.is_write]
        outputs.append((kwargs or {}).get("out"))
        if any(isinstance(leaf, cls) for leaf in pytree.tree_leaves(outputs)):
            raise TypeError(_NO_WRITING.format(func._schema.name.removeprefix("aten::")))
        args, kwargs = pytree.tree_map_only(cls, lambda rows: rows.read(), (args, kwargs or {}))
        return func(*args, **kwargs)
