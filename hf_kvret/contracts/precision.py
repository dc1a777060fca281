"""Dtypes of queries and rows, and ``torch.autocast``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}

_Owner = TypeVar("_Owner")
_Result = TypeVar("_Result")
_Params = ParamSpec("_Params")
_Method = Callable[Concatenate[_Owner, torch.Tensor, _Params], _Result]


def check_dtypes(**tensors: torch.Tensor) -> None:
    """ValueError unless all ``tensors``, by name, have one dtype that a cache can hold."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) == 1 and dtypes <= _DTYPES:
        return
    named = [f"{name} are {tensor.dtype}" for name, tensor in tensors.items()]
    form = ", ".join(named).replace("_", " ")
    if not dtypes <= _DTYPES:
        raise ValueError(
            f"{form}: a retrieval cache holds float32, bfloat16 or float16; convert the model with "
            "model.to(torch.float32)"
        )
    raise ValueError(
        f"{form}: a retrieval cache needs them in one dtype. Under torch.autocast a model of "
        "another dtype mixes them: leave autocast, and convert the model instead, as with "
        "model.to(torch.bfloat16)"
    )


def without_autocast(
    method: _Method[_Owner, _Params, _Result],
) -> _Method[_Owner, _Params, _Result]:
    """``method``, whose first argument is a tensor, computing in the dtypes that it is given.

    Under autocast a sum that is kept in fp32 would get parts in bf16.
    """

    @functools.wraps(method)
    def called(
        self: _Owner, first: torch.Tensor, /, *args: _Params.args, **kwargs: _Params.kwargs
    ) -> _Result:
        kind = first.device.type
        # The meta device has no autocast to ask for.
        if first.is_meta or not torch.is_autocast_enabled(kind):
            return method(self, first, *args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return method(self, first, *args, **kwargs)

    return called
