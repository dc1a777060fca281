"""Recorders: capture the device work of a step, to replay it without Python.

They also find where a step makes the host wait for the device, which no graph can replay.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

_MESSAGE = "called a synchronizing CUDA operation"
# Held by the thread that collects waits.
_collecting = threading.Lock()


class CudaRecorder:
    """CUDA graphs that share a memory pool and a stream; only the newest may be replayed.

    From torch 2.12 on, destroying a graph frees the workspaces that matrix products have on the
    stream that it was captured on (pytorch#193402). A graph that lives would then write into freed
    memory, so a recorder has a stream of its own, and destroys a graph before it captures the next.

    Raises:
        RuntimeError: all streams of the device are in use by recorders.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The newest graph, and a `torch.cuda.MemPool` that holds the memory while there is none.
        self._captured = SimpleNamespace(pool=None, graph=None)
        self._stream = _take_stream(device)
        weakref.finalize(self, _give_back, self._stream, self._captured).atexit = False

    def rehearse(self, step: Callable[[], Any]) -> tuple[Any, str | None]:
        """Run ``step`` for real, as it will be recorded, so that lazy initialization happens now.

        Returns the result of ``step``, and why it can't be recorded, as far as is known here. Runs
        on the capture stream, which gets its workspaces here.
        """
        with torch.cuda.device(self._device), _on_stream(self._stream), waits() as lines:
            result = step()
        return result, f"a step waits for the device: {lines[0]}" if lines else None

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run ``step`` in Python while its device work is recorded and not executed.

        ``torch.cuda.graph`` collects garbage and empties the memory cache each time. A step is
        recorded after every flush, so here the cache is only emptied when memory runs out.

        Returns:
            The result of ``step``, whose tensors are not filled yet; and a function that executes
            the recorded work, on the same memory each time, and so fills them.

        Raises:
            RuntimeError: the step waits for the device, or does work that can't be recorded. The
                device did nothing then.
        """
        try:
            return self._record(step)
        except torch.OutOfMemoryError:
            # During a capture the allocator can't free its cache. The caller undoes the step's
            # changes of host state, and may retry.
            torch.cuda.empty_cache()
            raise

    def _record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        captured = self._captured
        if captured.graph is not None:
            captured.graph.reset()
        elif captured.pool is None:
            with torch.cuda.device(self._device):
                captured.pool = torch.cuda.MemPool()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), _no_garbage_collection(), _on_stream(self._stream):
            # Other threads may use the device meanwhile.
            graph.capture_begin(pool=captured.pool.id, capture_error_mode="thread_local")
            try:
                result = step()
            except BaseException:
                self._abandon(graph)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._forget(graph)
                raise
        captured.graph = graph
        return result, graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that broke off in Python."""
        try:
            graph.capture_end()
        except RuntimeError:
            # The capture was already invalid, and reports it again.
            self._forget(graph)
        else:
            # The caller's traceback holds it, and it would hold the memory.
            graph.reset()

    def _forget(self, graph: torch.cuda.CUDAGraph) -> None:
        """Have the allocator forget a capture that could not be ended.

        An invalid capture ends with an error before the allocator is notified. The allocator would
        count it as running, and free no memory for the rest of the process.
        """
        pool = self._captured.pool.id
        torch._C._cuda_endAllocateToPool(self._device.index, pool)
        torch._C._cuda_releasePool(self._device.index, pool)
        _invalid_graphs.append(graph)


RECORDERS: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaRecorder}
"""What has ``rehearse`` and ``record``, as a ``CudaRecorder``, by type of device."""

# Their captures could not be ended: to the end of the process the allocator of pinned memory asks
# them whether a stream is theirs.
_invalid_graphs: list[torch.cuda.CUDAGraph] = []
# Pools of recorders that never had a graph.
_pools: list[Any] = []
# torch hands out so many streams of a device in turn.
_STREAMS = 32
# Streams of recorders that are gone, by device, and the addresses of all that recorders had.
_idle: dict[torch.device, list[torch.cuda.Stream]] = {}
_drawn: set[tuple[torch.device, int]] = set()
_stream_lock = threading.Lock()


def _take_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no other recorder has until it is given back."""
    with _stream_lock:
        if idle := _idle.setdefault(device, []):
            return idle.pop()
        for _ in range(_STREAMS):
            stream = torch.cuda.Stream(device)
            if (address := (device, stream.cuda_stream)) not in _drawn:
                _drawn.add(address)
                return stream
    raise RuntimeError(
        f"{_STREAMS} caches have captured steps on {device}, and there are no more streams: "
        "delete a DecodeGraph that is not needed any more"
    )


def _give_back(stream: torch.cuda.Stream, captured: SimpleNamespace) -> None:
    """Free what a recorder had, and let the next one have its stream.

    The pool goes before the graph: the last owner of the memory would wait for the device if it
    were the pool, which ends the process while another thread captures.
    """
    if captured.graph is None and captured.pool is not None:
        _pools.append(captured.pool)
    captured.pool = None
    if captured.graph is not None:
        captured.graph.reset()
    _idle.setdefault(stream.device, []).append(stream)


@contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the body on a separate stream, ordered after earlier and before later work."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


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


@contextmanager
def waits() -> Iterator[list[str]]:
    """Collects the host synchronizations of this thread in the body, a ``file:line`` each.

    torch's debug mode and Python's warnings belong to the process. So one thread collects at a
    time, and warnings about waits of other threads are dropped meanwhile. A thread that changes the
    filters of warnings in the body may hide waits.
    """
    lines: list[str] = []
    thread = threading.get_ident()
    with _collecting, warnings.catch_warnings():
        warnings.filterwarnings("always", _MESSAGE)
        show, mode = warnings.showwarning, torch.cuda.get_sync_debug_mode()

        def note(
            message: Warning | str, category: Any, filename: str, lineno: int, *more: Any
        ) -> None:
            if not str(message).startswith(_MESSAGE):
                show(message, category, filename, lineno, *more)
            elif threading.get_ident() == thread:
                lines.append(f"{filename}:{lineno}")

        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode(mode)
