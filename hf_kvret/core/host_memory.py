"""Host memory in huge pages, for what is read at random places."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

# Linux on x86 and most ARM machines; where they have another size, this is only an alignment.
_HUGE_PAGE = 2 << 20
# Smaller tensors gain little, and an aligned mapping takes up to a huge page of addresses more.
_LEAST_HUGE = 2 * _HUGE_PAGE


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized tensor; on a CPU, large ones lie in huge pages where there are any."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _LEAST_HUGE:
        return torch.empty(shape, dtype=dtype, device=device)
    return mapped(size).view(dtype).view(shape)


def mapped(size: int) -> torch.Tensor:
    """``[size]`` uint8 on the CPU in its own memory pages; unmapped with its last view.

    The system zeroes each page at its first use. MemoryError if it refuses the mapping.
    """
    huge = size >= _LEAST_HUGE
    length = size + _HUGE_PAGE if huge else size
    try:
        mapping = _private_mapping(length)
    except OSError as error:
        raise MemoryError(
            f"no {size / 2**30:.2f} GiB of host memory for rows ({error}): use shorter prompts or "
            "smaller batches, or free memory"
        ) from error
    raw = torch.frombuffer(mapping, dtype=torch.uint8)
    if not huge:
        return raw
    start = -raw.data_ptr() % _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Whole huge pages only: the remainder would take one that it does not fill.
        with contextlib.suppress(OSError):  # a kernel without them; the memory works all the same
            mapping.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE_PAGE * _HUGE_PAGE)
    return raw[start : start + size]


def _private_mapping(length: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, length)
