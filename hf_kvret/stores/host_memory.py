"""Host memory in huge pages, for random reads, and pinned memory of little more than its size."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import weakref

import torch

from hf_kvret.stores.chunks import finish_reading

# Linux on x86 and most ARM machines; where they have another size, this is only an alignment.
_HUGE_PAGE = 2 << 20
# Smaller tensors gain little, and an aligned mapping takes up to a huge page of addresses more.
_LEAST_HUGE = 2 * _HUGE_PAGE
# MADV_WIPEONFORK, which Python has no name for. (MADV_DONTFORK leaves a hole in the child, which
# other memory falls into and is lost with when the child unmaps it.)
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None
_MEMORY_PAGE = 4096


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized tensor; on a CPU, large ones lie in huge pages where there are any."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _LEAST_HUGE:
        return torch.empty(shape, dtype=dtype, device=device)
    return mapped(size).view(dtype).view(shape)


def mapped(size: int, inherited: bool = True) -> torch.Tensor:
    """``[size]`` uint8 on the CPU in its own memory pages; unmapped with its last view.

    The system zeroes each page at its first use. MemoryError if it refuses the mapping.

    Args:
        size: bytes; a multiple of memory pages where it is not ``inherited``.
        inherited: whether child processes get what stands in it, or zeros. Zeros where a device
            reads it: after a fork, a page that the parent writes to would move, and the device go
            on with the old one.
    """
    huge = size >= _LEAST_HUGE
    length = size + _HUGE_PAGE if huge else size
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            mapping = mmap.mmap(-1, length)
    except OSError as error:
        raise MemoryError(
            f"no {size / 2**30:.2f} GiB of host memory for rows ({error}): use shorter prompts, "
            "fewer new tokens or smaller batches, or free memory"
        ) from error
    raw = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -raw.data_ptr() % _HUGE_PAGE if huge else 0
    if not inherited:
        _advise(mapping, _WIPE_ON_FORK, start, size)
    if huge:
        # Whole huge pages only: the remainder would take one that it does not fill.
        huge_pages = getattr(mmap, "MADV_HUGEPAGE", None)
        _advise(mapping, huge_pages, start, size // _HUGE_PAGE * _HUGE_PAGE)
        # A storage of what is used: around it are addresses without memory.
        return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
    return raw


def expect_random_reads(tensor: torch.Tensor) -> None:
    """Have the system read no more of a file than is asked for, where ``tensor`` is its mapping."""
    advice = getattr(mmap, "MADV_RANDOM", None)
    if advice is None or not tensor.nbytes:
        return
    start = tensor.data_ptr() // _MEMORY_PAGE * _MEMORY_PAGE
    size = tensor.data_ptr() + tensor.nbytes - start
    # Where the system refuses the advice, reading works all the same.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def _advise(mapping: mmap.mmap, advice: int | None, start: int, size: int) -> None:
    """Where the system doesn't know the advice, the memory works all the same."""
    if advice is not None:
        with contextlib.suppress(OSError):
            mapping.madvise(advice, start, size)


def pinned(shape: tuple[int, ...], dtype: torch.dtype, stream: torch.cuda.Stream) -> torch.Tensor:
    """Pinned memory of this shape, in memory pages of its own; unpinned with the tensor.

    Callers must keep the tensor itself, not just a view of it.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        stream: that copies to it; unpinning waits for it.

    Raises:
        MemoryError: there is no such memory, or it can't be pinned.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    # With an end inside of a huge page, registering succeeds and an H200 (driver 580) does not
    # know the memory all the same.
    unit = _HUGE_PAGE if nbytes >= _LEAST_HUGE else _MEMORY_PAGE
    raw = mapped(-(-nbytes // unit) * unit, inherited=False)
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
