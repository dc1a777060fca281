"""What records the work of a step on a device, to do it again without Python."""

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
        """Run ``step`` as it will be recorded, for real: what is made at first use is made now.

        Returns what ``step`` returned, and why it can't be recorded, as far as that shows here.
        """

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run ``step`` in Python while its work on the device is noted instead of done.

        Returns:
            What ``step`` returned, whose tensors hold nothing yet; and a function that does the
            noted work, on the same memory each time, and so fills them.

        Raises:
            RuntimeError: the step waits for the device, or does what can't be noted. The device did
                nothing then.
        """


class CudaRecorder:
    """CUDA graphs that share one memory pool: only the newest may be replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # The newest. Without any, the allocator would give the pool up and begin another.
        self._graph: torch.cuda.CUDAGraph | None = None

    def rehearse(self, step: Callable[[], Any]) -> tuple[Any, str | None]:
        """See ``Recorder.rehearse``. On the stream of captures, which gets its workspaces so."""
        with torch.cuda.device(self._device), _on_capture_stream(self._device), _waits() as waits:
            result = step()
        return result, f"a step waits for the device: {waits[0]}" if waits else None

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """See ``Recorder.record``.

        ``torch.cuda.graph`` would collect garbage and give cached memory back each time; a step is
        recorded after every flush, so neither is done here, but where memory runs out.
        """
        try:
            return self._record(step)
        except torch.OutOfMemoryError:
            # While a step is captured, the allocator gives back nothing that it has in reserve. The
            # caller undoes what the step noted, and may come again.
            torch.cuda.empty_cache()
            raise

    def _record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            _no_garbage_collection(),
            _on_capture_stream(self._device),
        ):
            # Other threads go on using the device meanwhile.
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
            # It was invalid already, and says so again.
            self._release_pool()
        if self._graph is None:
            # Nothing holds the pool any more.
            self._pool = torch.cuda.graph_pool_handle()

    def _release_pool(self) -> None:
        """Have the allocator forget a capture that could not be ended.

        An invalid capture ends with an error before the allocator is told. It would go on
        counting it as under way, and give no memory back for the rest of the process.
        """
        torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        torch._C._cuda_releasePool(self._device.index, self._pool)


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""How steps are recorded, by type of device."""

# One for each device: the workspaces of matrix products belong to a stream and are never freed.
_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def _on_capture_stream(device: torch.device) -> Iterator[None]:
    """Work on a stream of its own, behind what was begun before and before what comes after."""
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
    """The waits of the host for the device within, one message each."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        told = str(warning.message)
        if "synchronizing CUDA operation" in told:
            found.append(f"{warning.filename}:{warning.lineno}")
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What is collected in the middle of a capture may be an older graph, whose end breaks it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
