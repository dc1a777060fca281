"""Tape: what a CUDA graph would do, on a CPU, so that captured steps are tested without a GPU.

A step is run once and every operation on tensors is logged with the tensors it read and wrote,
Triton's kernels in the interpreter among them. Replaying does these operations again, on the
same memory. Numbers that Python computed are frozen, as in a graph; whatever needs the host
raises. So a step that keeps its place on the host, waits for the device or makes tensors anew that
the next step needs gives wrong tokens here, or none, as it would on a GPU.

What it does not know: host memory that must be pinned, events and streams; copies to the host
(``tolist``, ``numpy``, ``cpu``), which are no operations where tensors lie there already.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_kvret.replay.compiled_layers import attend_now
from hf_kvret.replay.recorders import RECORDERS
from hf_kvret_kernels._dispatch import prefer

_aten = torch.ops.aten
# Operations that wait for the device, most of them for the number of elements of their result.
_WAITING = {
    _aten._local_scalar_dense: "reads a number of the device (item, int, bool)",
    _aten.nonzero: "has a shape that depends on data",
    _aten.masked_select: "has a shape that depends on data",
    _aten._unique2: "has a shape that depends on data",
    _aten.unique_dim: "has a shape that depends on data",
    _aten.unique_consecutive: "has a shape that depends on data",
    _aten.bincount: "has a shape that depends on data",
    _aten.equal: "reads a number of the device",
    _aten.is_nonzero: "reads a number of the device",
    _aten.allclose: "reads a number of the device",
    _aten.multinomial: "checks its probabilities on the host",
    _aten._linalg_check_errors: "checks on the host whether the matrix could be solved",
}
# Others that can't be captured.
_FORBIDDEN = {
    _aten.lift_fresh: "copies numbers of the host to the device (torch.tensor)",
    _aten.resize_: "moves memory",
    _aten.set_: "moves memory",
}


class CaptureError(RuntimeError):
    """A step did what can't be captured."""


class TapeRecorder:
    """In place of ``hf_kvret.replay.recorders.CudaRecorder``, for the CPU."""

    def __init__(self, device: torch.device) -> None:
        del device

    def rehearse(self, step: Callable[[], Any]) -> tuple[Any, str | None]:
        """See ``CudaRecorder.rehearse``; nothing shows before it is recorded."""
        return step(), None

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """See ``CudaRecorder.record``; CaptureError for a step that a GPU could not capture.

        The step's work is done and then undone: memory that was there before is as it was.
        """
        tape = Tape()
        try:
            with tape, logged_launches(tape):
                result = step()
        finally:
            tape.undo()
        operations = tuple(tape.operations)

        def replay() -> None:
            # Inference mode alone may write to inference tensors and to others.
            with torch.inference_mode():
                for redo in operations:
                    redo()

        return result, replay


@contextmanager
def taped() -> Iterator[None]:
    """Context in which a CPU has graphs, and runs the kernels that a GPU would run.

    Needs Triton and ``TRITON_INTERPRET=1``. Slow: for small models.
    """
    RECORDERS["cpu"] = TapeRecorder
    try:
        with prefer("triton"):
            yield
    finally:
        del RECORDERS["cpu"]


class Tape(TorchDispatchMode):
    """Logs what is done while it is entered.

    Attributes:
        operations: what does each of them again, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self._born: set[int] = set()
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = decomposed(self, func, args, kwargs)
        if out is not NotImplemented:
            return out
        _check(func, args, kwargs)
        self.save(written_by(func, args, kwargs))
        out = func(*args, **kwargs)
        read = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        fresh = [tensor for tensor in _tensors(out) if _memory(tensor) not in read]
        self._born |= {_memory(tensor) for tensor in fresh}
        args, kwargs = self.for_replays((args, kwargs))

        def redo() -> None:
            again = func(*args, **kwargs)
            new = [tensor for tensor in _tensors(again) if _memory(tensor) not in read]
            for target, source in zip(fresh, new, strict=True):
                target.copy_(source)

        self.operations.append(redo)
        return out

    def save(self, tensors: list[torch.Tensor]) -> None:
        """Keep what stands in ``tensors``, which are about to be written, if it is from before."""
        for tensor in tensors:
            memory = _memory(tensor)
            if memory not in self._born and memory not in self._saved:
                whole = tensor.new_empty(0).set_(tensor.untyped_storage())
                self._saved[memory] = whole, whole.clone()

    def undo(self) -> None:
        """Put back what stood in memory that was there before."""
        for whole, before in self._saved.values():
            whole.copy_(before)
        self._saved = {}

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that replays use for ``tensor``, which was there before: the same one."""
        return tensor

    def for_replays(self, values: Any) -> Any:
        """``values`` with ``held`` tensors for those that were there before."""

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if _memory(tensor) in self._born else self.held(tensor)

        return tree_map_only(torch.Tensor, kept, values)


@contextmanager
def logged_launches(tape: Tape) -> Iterator[None]:
    """Kernels of Triton's interpreter are logged too, with the grid that they were launched on.

    Without Triton there are none.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launch_and_log(executor: Any, *args: Any, **kwargs: Any) -> None:
        def redo() -> None:
            with _disable_current_modes():
                launch(executor, *args, **kwargs)

        with _disable_current_modes():
            tape.save(_tensors((args, kwargs)))
            args, kwargs = tape.for_replays((args, kwargs))
        redo()
        tape.operations.append(redo)

    GridExecutor.__call__ = launch_and_log
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


def decomposed(
    mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of an operation that is made of others, which ``mode`` sees in its place.

    In inference mode those of torch come whole. NotImplemented for any other operation.
    """
    with mode:
        if func is torch.ops.hf_kvret.attend.default:
            return attend_now(*args, **kwargs)
        return func.decompose(*args, **kwargs) if _is_composite(func) else NotImplemented


@cache
def _is_composite(func: Any) -> bool:
    """Whether it is made of other operations, which inference mode hides."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def why_it_waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the host waits for the device in this operation; None where it does not."""
    packet = func.overloadpacket
    if packet in (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_):
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        return "takes a mask as an index" if masks else None
    if packet is _aten.histc and not any((*args[2:], kwargs.get("min"), kwargs.get("max"))):
        return "reads the limits that it was not given"
    counted = func in (_aten.repeat_interleave.Tensor, _aten.repeat_interleave.self_Tensor)
    if counted and kwargs.get("output_size") is None:
        return "has a shape that depends on data"
    return _WAITING.get(packet)


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    reason = why_it_waits(func, args, kwargs) or _FORBIDDEN.get(func.overloadpacket)
    if reason is not None:
        raise CaptureError(f"{func} {reason}")


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that ``func`` writes to."""
    named = [(argument.name, argument) for argument in func._schema.arguments]
    values = dict(zip([name for name, _ in named], args, strict=False)) | kwargs
    written = [
        values[name]
        for name, argument in named
        if argument.alias_info is not None and argument.alias_info.is_write and name in values
    ]
    return _tensors(written)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
