"""Recorders: capture the device work of a step, to replay it without Python."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Records steps on one device, one after the other."""

    def rehearse(self, step: Callable[[], Any]) -> tuple[Any, str | None]:
        """Run ``step`` for real, as it will be recorded, so that lazy initialization happens now.

        Returns the result of ``step``, and why it can't be recorded, as far as can be told here.
        """

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run ``step`` in Python while its device work is recorded and not executed.

        Returns:
            The result of ``step``, whose tensors are not filled yet; and a function that executes
            the recorded work, on the same memory each time, and so fills them.

        Raises:
            RuntimeError: the step waits for the device, or does work that can't be recorded. The
                device did nothing then.
        """


class CudaRecorder:
    """CUDA graphs that share one memory pool; only the newest may be replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # The newest graph. Without any, the allocator would release the pool.
        self._graph: torch.cuda.CUDAGraph | None = None

    def rehearse(self, step: Callable[[], Any]) -> tuple[Any, str | None]:
        """See ``Recorder.rehearse``. Runs on the capture stream, which gets its workspaces here."""
        with torch.cuda.device(self._device), _on_capture_stream(self._device), _waits() as waits:
            result = step()
        return result, f"a step waits for the device: {waits[0]}" if waits else None

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """See ``Recorder.record``.

        ``torch.cuda.graph`` collects garbage and empties the memory cache each time. A step is
        recorded after every flush, so here the cache is only emptied when memory runs out.
        """
        try:
            return self._record(step)
        except torch.OutOfMemoryError:
            # During a capture the allocator can't free its cache. The caller undoes the step's
            # changes of host state, and may retry.
            torch.cuda.empty_cache()
            raise

    def _record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            _no_garbage_collection(),
            _on_capture_stream(self._device),
        ):
            # Other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = step()
            except BaseException:
                self._abandon(graph)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._release_pool()
                raise
        self._graph = graph
        return result, graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that broke off in Python."""
        try:
            graph.capture_end()
        except RuntimeError:
            # The capture was already invalid, and reports it again.
            self._release_pool()
        if self._graph is None:
            # Nothing holds the pool any more.
            self._pool = torch.cuda.graph_pool_handle()

    def _release_pool(self) -> None:
        """Have the allocator forget a capture that could not be ended.

        An invalid capture ends with an error before the allocator is notified. The allocator would
        count it as running, and free no memory for the rest of the process.
        """
        torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        torch._C._cuda_releasePool(self._device.index, self._pool)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""How steps are recorded, by type of device."""

# One for each device: the workspaces of matrix products belong to a stream and are never freed.
_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def _on_capture_stream(device: torch.device) -> Iterator[None]:
    """Run the body on a separate stream, ordered after earlier and before later work."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@contextmanager
def _waits() -> Iterator[list[str]]:
    """Collects host synchronizations in the body, a ``file:line`` each; complete after the body."""
    messages: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield messages
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in records:
        text = str(warning.message)
        if "synchronizing CUDA operation" in text:
            messages.append(f"{warning.filename}:{warning.lineno}")
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """No garbage collection in the body: freeing an older graph would break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
