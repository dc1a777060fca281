"""Memory for pages of rows: on the device, pinned on the host, or in files."""

from __future__ import annotations

import errno
import math
import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque

import torch

from hf_kvret.contracts import host_memory
from hf_kvret.contracts.state import is_mapped
from hf_kvret.stores.chunks import finish_reading

CPU = torch.device("cpu")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Two layers of a prompt of 128K tokens, at 8 KV heads of 128 in 16 bits.
_MOST_BYTES = 1 << 30
# By device, of all stores and caches of the process.
_copies: dict[torch.device, PendingCopies] = {}


class PageMemory(ABC):
    """Allocates chunks of pages and writes rows into them, for a compute device."""

    over_bus = False
    """Whether the device reads rows in host memory."""

    on_host = False
    """Whether rows count as host memory."""

    in_files = False
    """Whether rows may have to be read from a disk."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor of ``shape``."""

    @abstractmethod
    def write(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy ``rows`` (on the compute device) to ``target``, a view of an allocated tensor."""

    def takes(self, pages: torch.Tensor) -> bool:
        """Whether pages that lie elsewhere, as in a file's mapping, can be a chunk as they are."""
        return False

    def wait(self) -> None:  # noqa: B027 - nothing to wait for is the common case
        """Make the device's current stream wait for all writes."""

    def synchronize(self) -> None:  # noqa: B027 - nothing to wait for is the common case
        """Make the host wait for all writes; a ``wait`` after it is a no-op."""


class DeviceMemory(PageMemory):
    """Rows on the device of the queries."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return host_memory.empty(shape, dtype, self.device)
        except torch.OutOfMemoryError as error:
            size = math.prod(shape) * dtype.itemsize / 2**30
            error.add_note(
                f"The cache asked for {size:.2f} GiB more for its rows: keep them in host memory "
                "with store='host'"
            )
            raise

    def takes(self, pages: torch.Tensor) -> bool:
        return pages.device == self.device

    def write(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        target.copy_(rows)


class HostMemory(PageMemory):
    """Rows in host memory, pinned where there is a GPU that reads them over the bus.

    Chunks of 4 MiB and more are aligned to huge pages, which Linux is asked to use, so that random
    reads need fewer page table walks. Chunks are registered with CUDA at their size, those in huge
    pages up to the end of the last one (torch's pinned allocator rounds up to a power of two).
    Writes run on a side stream; ``wait`` orders the reader behind them. Rows of the meta device
    have no contents and stay there.

    Args:
        device: where rows come from.
        reader: the device that reads them and has the page tables; None: the same device. For the
            CPU, ``wait`` blocks.
    """

    over_bus = True
    on_host = True

    def __init__(self, device: torch.device, reader: torch.device | None = None) -> None:
        super().__init__(reader or device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._chunk_device = device if device.type == "meta" else CPU
        self._last_write: torch.cuda.Event | None = None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._stream is None:
            return host_memory.empty(shape, dtype, self._chunk_device)
        return pinned(shape, dtype, self._stream)

    def takes(self, pages: torch.Tensor) -> bool:
        return self._stream is None and self.device == self._chunk_device == pages.device

    def write(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        if self._stream is None:
            target.copy_(rows)
            return
        source = rows.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            _copy_runs(target, source)
        source.record_stream(self._stream)
        self._last_write = self._stream.record_event()
        copies = _copies.setdefault(rows.device, PendingCopies())
        copies.add(self._last_write, source.nbytes)

    def wait(self) -> None:
        if self._last_write is None:
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self._last_write)
        else:
            self._last_write.synchronize()

    def synchronize(self) -> None:
        if self._last_write is not None:
            self._last_write.synchronize()
            # During capture a stream can't wait for an event from outside of the graph.
            self._last_write = None


class DiskMemory(PageMemory):
    """Rows in files of ``folder``: the system keeps in memory what is in use, as far as it fits.

    The files have no names, so that they are gone with their last view, or with the process.
    """

    in_files = True
    on_host = True

    def __init__(self, folder: str) -> None:
        super().__init__(CPU)
        self._folder, self._process = folder, os.getpid()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # Without it a full disk would be a signal at some later write.
                os.posix_fallocate(file.fileno(), 0, size)
                name = f"/proc/self/fd/{file.fileno()}"
                rows = torch.from_file(name, True, size, dtype=torch.uint8, device=CPU)
        except (OSError, RuntimeError) as error:
            remedy = "free space, or name" if getattr(error, "errno", None) in _FULL else "name"
            raise OSError(
                f"disk={self._folder!r}: no {size / 1e9:.2f} GB for rows ({error}): {remedy} a "
                "folder on another disk, and begin again with cache.reset()"
            ) from error
        host_memory.expect_random_reads(rows)
        return rows.view(dtype).view(shape)

    def takes(self, pages: torch.Tensor) -> bool:
        return is_mapped(pages)

    def write(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"rows of store='disk' are those of process {self._process}, which would see what "
                "its child writes: fill or load a cache in the child"
            )
        target.copy_(rows)


def check_folder(folder: str) -> None:
    """ValueError where there is no such folder, or the system has no files that this needs."""
    if not os.path.isdir(folder):
        raise ValueError(f"disk={folder!r}: there is no such folder, make it")
    if not hasattr(os, "posix_fallocate") or not os.path.isdir("/proc/self/fd"):
        raise ValueError("store='disk' needs Linux: take store='cpu' or 'higgs' here")


class PendingCopies:
    """Pending copies from one device, oldest first; threads share it.

    The rows of a copy stay in device memory until it ends. The host launches layers far ahead of
    the device, so the rows of all launched layers would be in memory at once. Therefore the host
    waits for the oldest copies when more than ``most_bytes`` are pending. The device does not idle:
    it has the work of the layers in between.

    Attributes:
        nbytes: of the copies that are not known to have ended.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._queue: deque[tuple[torch.cuda.Event, int]] = deque()
        self._lock = threading.Lock()

    def add(self, event: torch.cuda.Event, size: int) -> None:
        """Note a copy of ``size`` bytes; waits until all but ``most_bytes`` have been copied.

        The newest copy is never waited for, however large it is.
        """
        with self._lock:
            self._queue.append((event, size))
            self.nbytes += size
            while len(self._queue) > 1:
                oldest, oldest_bytes = self._queue[0]
                if not oldest.query():
                    if self.nbytes <= self.most_bytes:
                        return
                    oldest.synchronize()
                self._queue.popleft()
                self.nbytes -= oldest_bytes


def _copy_runs(target: torch.Tensor, rows: torch.Tensor) -> None:
    """Asynchronous copies, one per contiguous run of ``target``: a strided copy would block."""
    if target.is_contiguous():
        target.copy_(rows, non_blocking=True)
        return
    for run, source in zip(target, rows, strict=True):
        _copy_runs(run, source)


def pinned(shape: tuple[int, ...], dtype: torch.dtype, stream: torch.cuda.Stream) -> torch.Tensor:
    """Pinned memory of this shape, in memory pages of its own; unpinned with the tensor.

    Callers must keep the tensor itself, not just a view of it. Unpinning waits for ``stream``,
    which copies to it.

    Raises:
        MemoryError: there is no such memory, or it can't be pinned.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    # With an end inside of a huge page, registering succeeds and an H200 (driver 580) does not
    # know the memory all the same.
    unit = host_memory.HUGE_PAGE if nbytes >= host_memory.LEAST_HUGE else host_memory.MEMORY_PAGE
    raw = host_memory.mapped(-(-nbytes // unit) * unit, inherited=False)
    _register(raw, stream.device)
    chunk = raw[:nbytes].view(dtype).view(shape)
    # At the end of Python the system unpins.
    weakref.finalize(chunk, _unpin, chunk.data_ptr(), stream, os.getpid()).atexit = False
    return chunk


def _register(raw: torch.Tensor, device: torch.device) -> None:
    # Without the context the first GPU would be set up, which may not be in use at all.
    with torch.cuda.device(device):
        status = int(torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), raw.nbytes, 0))
    if status != 0:
        raise MemoryError(
            f"cudaHostRegister could not pin {raw.nbytes / 2**30:.1f} GiB of host memory (error "
            f"{status}): raise the locked-memory limit (ulimit -l), or use store='device'"
        )


def _unpin(address: int, stream: torch.cuda.Stream, process: int) -> None:
    """Unregister once no copy and no kernel can still be using the memory.

    Not in a child process of the one that registered it: a child has no GPU.
    """
    if process != os.getpid():
        return
    with torch.cuda.device(stream.device):
        stream.synchronize()
        torch.cuda.current_stream(stream.device).synchronize()
        finish_reading(stream.device)
        torch.cuda.cudart().cudaHostUnregister(address)
