"""Memory that pages of rows are made of: the device's, or pinned host memory."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

import torch


class PageMemory(ABC):
    """Allocates chunks of pages and writes rows into them, for a compute device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor of exactly ``shape``."""

    @abstractmethod
    def write(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy ``rows`` (on the compute device) to ``target``, a view of an allocated tensor."""

    def wait(self) -> None:  # noqa: B027 - nothing to wait for is the common case
        """Make the device's current stream wait for all writes."""


class DeviceMemory(PageMemory):
    """Rows beside the queries."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def write(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        target.copy_(rows)


class HostMemory(PageMemory):
    """Rows in host memory, pinned where there is a GPU that reads them over the bus.

    Chunks are registered with CUDA at their exact size (torch's pinned allocator rounds up to a
    power of two). Writes run on a side stream; ``wait`` orders the reader behind them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pins = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pins else None
        self._written = False

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        chunk = torch.empty(shape, dtype=dtype)
        if self._pins:
            _register(chunk)
        return chunk

    def write(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        if self._stream is None:
            target.copy_(rows)
            return
        packed = rows.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            _copy_runs(target, packed)
        packed.record_stream(self._stream)
        self._written = True

    def wait(self) -> None:
        if self._stream is not None and self._written:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            self._written = False


def _copy_runs(target: torch.Tensor, packed: torch.Tensor) -> None:
    """Asynchronous copies, one per contiguous run of ``target``: a strided one would block."""
    if target.is_contiguous():
        target.copy_(packed, non_blocking=True)
        return
    for part, source in zip(target, packed, strict=True):
        _copy_runs(part, source)


def _register(chunk: torch.Tensor) -> None:
    """Pin ``chunk`` as long as it lives; its owners hold the tensor itself, not views."""
    runtime = torch.cuda.cudart()
    address, size = chunk.data_ptr(), chunk.nbytes
    status = runtime.cudaHostRegister(address, size, 0)
    if int(status) != 0:
        raise MemoryError(
            f"cudaHostRegister could not pin {size / 2**30:.1f} GiB of host memory (error "
            f"{int(status)}): raise the locked-memory limit (ulimit -l), or use store='device'"
        )
    weakref.finalize(chunk, runtime.cudaHostUnregister, address).atexit = False
