"""Host memory in huge pages, for random reads."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys

import torch

# Linux on x86 and most ARM machines; where they have another size, this is only an alignment.
HUGE_PAGE = 2 << 20
# Smaller tensors gain little, and an aligned mapping takes up to a huge page of addresses more.
LEAST_HUGE = 2 * HUGE_PAGE
# MADV_WIPEONFORK, which Python has no name for. (MADV_DONTFORK leaves a hole in the child, which
# other memory falls into and is lost with when the child unmaps it.)
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None
MEMORY_PAGE = 4096


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized tensor; on a CPU, large ones lie in huge pages where there are any."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < LEAST_HUGE:
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
    huge = size >= LEAST_HUGE
    length = size + HUGE_PAGE if huge else size
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
    start = -raw.data_ptr() % HUGE_PAGE if huge else 0
    if not inherited:
        _advise(mapping, _WIPE_ON_FORK, start, size)
    if huge:
        # Whole huge pages only: the remainder would take one that it does not fill.
        huge_pages = getattr(mmap, "MADV_HUGEPAGE", None)
        _advise(mapping, huge_pages, start, size // HUGE_PAGE * HUGE_PAGE)
        # A storage of what is used: around it are addresses without memory.
        return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
    return raw


def expect_random_reads(tensor: torch.Tensor) -> None:
    """Have the system read no more of a file than is asked for, where ``tensor`` is its mapping."""
    advice = getattr(mmap, "MADV_RANDOM", None)
    if advice is None or not tensor.nbytes:
        return
    start = tensor.data_ptr() // MEMORY_PAGE * MEMORY_PAGE
    size = tensor.data_ptr() + tensor.nbytes - start
    # Where the system refuses the advice, reading works all the same.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def _advise(mapping: mmap.mmap, advice: int | None, start: int, size: int) -> None:
    """Where the system doesn't know the advice, the memory works all the same."""
    if advice is not None:
        with contextlib.suppress(OSError):
            mapping.madvise(advice, start, size)
