"""Code of the library on tensors that have shapes and no contents (torch's meta device)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NUMBERS: dict[str, Any] = {
    "__bool__": False,
    "__int__": 0,
    "__index__": 0,
    "__float__": 0.0,
    "item": 0,
}


class Blank(TorchFunctionMode):
    """Context in which questions about contents that are not there get the plain answer.

    Nothing is padded, NaN, infinite or due: ``all`` and ``isfinite`` of a whole tensor say True,
    ``any`` says False, ``nonzero`` finds nothing, other numbers are 0, copies on the CPU too.
    Tensors on other devices answer for themselves.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        asked = args[0] if args else None
        if isinstance(asked, torch.Tensor) and asked.is_meta:
            name = getattr(func, "__name__", "")
            if name in _NUMBERS:
                return _NUMBERS[name]
            if name == "nonzero":
                places = asked.new_empty((0, asked.ndim), dtype=torch.long)
                return places.unbind(1) if kwargs.get("as_tuple") else places
            if name == "cpu":
                return torch.zeros((), dtype=asked.dtype).expand(asked.shape)
            if name in ("all", "any") and len(args) == 1 and not kwargs:
                return torch.tensor(name == "all")
            if name == "isfinite" and not asked.ndim:
                return torch.tensor(True)
        return func(*args, **kwargs)
