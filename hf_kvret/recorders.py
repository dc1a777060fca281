"""What records the work of a step on a device, to do it again without Python."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Records steps on one device, one after the other."""

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
        # The newest. Without any, the allocator would give the pool up and begin another.
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """See ``Recorder.record``.

        ``torch.cuda.graph`` would collect garbage and give cached memory back each time; a step is
        recorded after every flush, so neither is done here.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), _no_garbage_collection():
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                # Other threads go on using the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = step()
                except BaseException:
                    # It is invalid, and says so again.
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
            current.wait_stream(self._stream)
        self._graph = graph
        return result, graph.replay


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""How steps are recorded, by type of device."""


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
