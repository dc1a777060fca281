"""What a step asks of the device: how many launches, and where it waits for it."""

from __future__ import annotations

import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_kvret_kernels._dispatch import interpreted

_aten = torch.ops.aten
# The host waits for a number, or for a size that depends on data, or copies what is not pinned.
_WAITS = {
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
    _aten.equal,
    _aten.lift_fresh,
}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
# They make a tensor and leave what is in it to others, or only look at one differently.
_NO_LAUNCH = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten._unsafe_view,
}
_OURS = re.compile(r"(hf_kvret\w*|transformers)/")


class StepOps(TorchDispatchMode):
    """Counts, while it is on, what operations on CPU tensors would ask of a GPU.

    Operations that launch a kernel: all but views and empty tensors; a Triton kernel in the
    interpreter is one. Operations that a GPU's host would wait in.

    Args:
        part: says which part of a step is at work.

    Attributes:
        launches: by part.
        waits: by operation and place in the code.
    """

    def __init__(self, part: Callable[[], str]) -> None:
        super().__init__()
        self._part = part
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if func.namespace != "profiler" and not func.is_view and packet not in _NO_LAUNCH:
            self.launches[self._part()] += 1
        if _waits(func, args, kwargs):
            self.waits[f"{packet.__name__} at {_place()}"] += 1
        return func(*args, **kwargs)


@contextmanager
def counted_ops(part: Callable[[], str]) -> Iterator[StepOps]:
    """A ``StepOps`` that is on, Triton kernels in the interpreter counted as well."""
    with ExitStack() as stack:
        ops = stack.enter_context(StepOps(part))
        if interpreted():
            from triton.runtime.interpreter import GridExecutor

            launch = GridExecutor.__call__

            def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
                ops.launches[part()] += 1
                # What the interpreter does to run a kernel is none of the caller's operations.
                with _disable_current_modes():
                    return launch(executor, *args, **kwargs)

            stack.enter_context(patch.object(GridExecutor, "__call__", counted))
        yield ops


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Synchronizations on CUDA, by place in the code, as torch's sync debug mode tells them."""
    found: Counter[str] = Counter()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            for one in told:
                if "synchronizing CUDA operation" in str(one.message):
                    found[f"{_short(one.filename)}:{one.lineno}"] += 1


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    packet = func.overloadpacket
    if packet in _WAITS:
        return True
    if packet in _INDEXING:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    counts = func in (_aten.repeat_interleave.Tensor, _aten.repeat_interleave.self_Tensor)
    return counts and kwargs.get("output_size") is None


def _place() -> str:
    """The innermost line of the library or of the model that is running."""
    for frame in reversed(traceback.extract_stack()):
        if _OURS.search(frame.filename) and not frame.filename.endswith("step_ops.py"):
            return f"{_short(frame.filename)}:{frame.lineno}"
    return "elsewhere"


def _short(filename: str) -> str:
    """A path from its package on."""
    found = list(_OURS.finditer(filename))
    return filename[found[-1].start() :] if found else filename
