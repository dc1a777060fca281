"""CpuStore, DiskStore: rows in host memory or in files, attended to by the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

import torch

from hf_kvret.contracts.state import Tensors
from hf_kvret.contracts.store import AttentionResult, RowChunks
from hf_kvret.stores.memory import CPU, DiskMemory, HostMemory, PageMemory
from hf_kvret.stores.paged import PagedStore, WrappedStore
from hf_kvret_kernels.gather_attention import gather_attention, gather_scores
from hf_kvret_kernels.paged import PagedRows
from hf_kvret_kernels.relevance import host_rank

_attention = partial(gather_attention, backend="host")
# Results, on the CPU, of a function of (queries, rows, ids).
Result = TypeVar("Result", bound=tuple[torch.Tensor, ...])

# One worker for all stores: layers run one after the other, and the kernel is multi-threaded.
_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_kvret-host-attention")


def _scores(
    query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, **scoring: Any
) -> tuple[torch.Tensor]:
    return (gather_scores(query, rows, ids, backend="host", **scoring),)


def _best(
    query: torch.Tensor, rows: PagedRows, ids: torch.Tensor, count: int, **scoring: Any
) -> tuple[torch.Tensor]:
    return (host_rank(*_scores(query, rows, ids, **scoring), ids, count),)


class CpuStore(WrappedStore):
    """Selected rows never move: the CPU attends to them while the device attends to its window.

    Queries and ids are copied to the host, outputs and their lse back; keys and values stay. With
    queries on a GPU, ``begin`` copies them on a separate stream and a worker thread waits for them.
    So the GPU does the window's part meanwhile; the launching thread waits for the worker when the
    two parts are merged, at every step and layer.
    As in CTkvr (section 3.3) and A2ATS, for every index.

    Attributes:
        name: of the store, as ``store`` has it.

    Args:
        device: where queries are.
        memory: where rows lie, which the CPU reads; None for host memory.
    """

    name = "cpu"

    def __init__(self, device: torch.device, memory: PageMemory | None = None) -> None:
        super().__init__(PagedStore(memory or HostMemory(device, CPU)))
        self._device = device
        self._staging: dict[str, _Staging] = {}

    def load_state_dict(self, state: Tensors, device: torch.device | None = None) -> None:
        self.rows.load_state_dict(state, device)

    def begin(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> Callable[[], AttentionResult]:
        return self._start("attend", partial(_attention, scale=scale, softcap=softcap), query, ids)

    def host_rows(self) -> PagedRows | None:
        return self.rows.host_rows()

    def scores(
        self, query: torch.Tensor, ids: torch.Tensor, scale: float, softcap: float | None = None
    ) -> torch.Tensor:
        work = partial(_scores, scale=scale, softcap=softcap)
        return self._start("scores", work, query, ids)()[0]

    def best(
        self,
        query: torch.Tensor,
        ids: torch.Tensor,
        count: int,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """As for every store; the CPU scores and ranks, and only the best ids are copied back."""
        work = partial(_best, count=count, scale=scale, softcap=softcap)
        return self._start("best", work, query, ids)()[0]

    def _start(
        self, purpose: str, work: Callable[..., Result], query: torch.Tensor, ids: torch.Tensor
    ) -> Callable[[], Result]:
        """Start ``work`` on the CPU; returns a function that waits for its results on the device.

        ``purpose`` names the staging memory, which keeps the shapes of its last use.
        """
        rows = self.rows.paged_rows()
        if query.device.type == "cpu":
            return lambda: work(query, rows, ids)
        if purpose not in self._staging:
            self._staging[purpose] = _Staging(query.device)
        staging = self._staging[purpose]
        arrival = staging.send(query, ids)

        def turn() -> None:
            arrival.synchronize()
            staging.send_back(work(staging.query, rows, staging.ids))

        future = _worker.submit(turn)

        def finish() -> Result:
            future.result()
            return staging.receive()

        return finish

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.rows.gather(ids.cpu())
        return keys.to(self._device), values.to(self._device)

    def chunks(self, chunk_len: int = 4096, stop: int | None = None) -> RowChunks:
        if not self.rows.memory.in_files:
            return self.rows.chunks(chunk_len, stop, self._device)
        # Files are not pinned, so that a GPU can't read them itself.
        return (
            (start, keys.to(self._device), values.to(self._device))
            for start, keys, values in self.rows.chunks(chunk_len, stop)
        )

    def key_chunks(self, chunk_len: int = 4096) -> Iterator[tuple[int, torch.Tensor]]:
        """As for every store; a GPU reads whole rows, and the next chunk while one is in use."""
        here = self._device.type == "cpu"
        return self.rows.key_chunks(chunk_len) if here else super().key_chunks(chunk_len)

    @property
    def over_bus(self) -> bool:
        """False: the device reads no rows."""
        return False

    def fork(self) -> Self:
        """As every state's, with staging memory of its own."""
        twin = super().fork()
        twin._staging = {}
        return twin

    def host_nbytes(self) -> int:
        """All bytes: the page table is in host memory, too."""
        return self.nbytes()

    @property
    def capture_obstacle(self) -> str | None:
        return f"store={self.name!r} attends on the CPU, whose work a CUDA graph can't replay"


class DiskStore(CpuStore):
    """Rows in files; the CPU attends to those that are selected, where they are mapped.

    While the process reads from its disks, the compiled library asks for all rows that a head
    selects before it reads the first, so that a disk has many requests at once. Else a step is
    that of the ``CpuStore``.

    Args:
        device: where queries are.
        folder: for the files.
    """

    name = "disk"

    def __init__(self, device: torch.device, folder: str) -> None:
        super().__init__(device, DiskMemory(folder))


class _Staging:
    """Pinned memory between a GPU and the CPU, and the stream that copies through it.

    One request at a time. Copies run in stream order, so the next request's queries arrive only
    after this request's results have been copied out.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._back: torch.cuda.Event | None = None
        self.query = self.ids = torch.empty(0)
        self._host_results: tuple[torch.Tensor, ...] = ()
        self._result: tuple[torch.Tensor, ...] = ()

    def send(self, query: torch.Tensor, ids: torch.Tensor) -> torch.cuda.Event:
        """Start copying to ``self.query`` and ``self.ids``; the event marks their arrival."""
        # A strided copy would go through a temporary, which the launching thread waits for.
        query, ids = query.contiguous(), ids.contiguous()
        self.query, self.ids = _pinned_like(self.query, query), _pinned_like(self.ids, ids)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in ((self.query, query), (self.ids, ids)):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            return self._stream.record_event()

    def send_back(self, results: tuple[torch.Tensor, ...]) -> None:
        """Start copying results to the device; called by the worker."""
        buffers = self._host_results or results
        self._host_results = tuple(map(_pinned_like, buffers, results))
        for target, source in zip(self._host_results, results, strict=True):
            target.copy_(source)
        with torch.cuda.stream(self._stream):
            self._result = tuple(x.to(self._device, non_blocking=True) for x in self._host_results)
            self._back = self._stream.record_event()

    def receive(self) -> Any:
        """The results on the device, whose current stream waits for them."""
        assert self._back is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._back)
        for result in self._result:
            result.record_stream(current)
        return self._result


# An inference tensor could not be written to later, outside inference mode.
@torch.inference_mode(False)
def _pinned_like(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory with the shape and dtype of ``tensor``; ``memory`` itself if it fits."""
    if memory.shape == tensor.shape and memory.dtype == tensor.dtype and memory.is_pinned():
        return memory
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
