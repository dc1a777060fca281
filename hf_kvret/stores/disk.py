"""DiskStore: rows in files of a folder, mapped, for contexts that don't fit into memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Callable

import torch

from hf_kvret.stores.cpu import CpuStore, Result
from hf_kvret.stores.host_memory import MEMORY_PAGE, expect_random_reads
from hf_kvret.stores.memory import CPU, PageMemory
from hf_kvret_kernels.paged import PagedRows

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

# Blocks of 512 bytes that a process reads from disks while nothing of a store is missing.
_FEW_BLOCKS = 256


class DiskMemory(PageMemory):
    """Rows in files of ``folder``: the system keeps in memory what is in use, as far as it fits.

    The files have no names, so that they are gone with their last view, or with the process.

    Raises:
        ValueError: there is no such folder, or the system lacks what this needs.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(CPU)
        if not os.path.isdir(folder):
            raise ValueError(f"disk={folder!r}: there is no such folder, make it")
        if resource is None or not hasattr(os, "posix_fallocate"):
            raise ValueError("store='disk' needs Linux: take store='cpu' or 'higgs' here")
        self._folder = folder

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, least: int = 1) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        try:
            with tempfile.NamedTemporaryFile(prefix=".hf_kvret-", dir=self._folder) as file:
                # Without it a full disk would be a signal at some later write.
                os.posix_fallocate(file.fileno(), 0, size)
                rows = torch.from_file(file.name, True, size, dtype=torch.uint8, device=CPU)
        except OSError as error:
            message = (
                f"disk={self._folder!r}: no {size / 1e9:.2f} GB for rows ({error.strerror}): free "
                "space, or name a folder on another disk. cache.crop(0) drops the pass that broke "
                "off, cache.reset() a first one"
            )
            raise OSError(error.errno, message) from error
        expect_random_reads(rows)
        return rows.view(dtype).view(shape)

    def on_host(self, chunk: torch.Tensor) -> bool:
        return True

    def takes(self, pages: torch.Tensor) -> bool:
        return pages.is_cpu

    def write(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        target.copy_(rows)


class DiskStore(CpuStore):
    """Rows in files; the CPU attends to those that are selected, where they are mapped.

    While a process reads from its disks, a step asks for all selected rows before it attends, so
    that the disk has many requests at once. Else nothing is asked, and a step is that of the
    ``CpuStore``.

    Args:
        device: where queries are.
        folder: for the files.
    """

    def __init__(self, device: torch.device, folder: str) -> None:
        super().__init__(device, DiskMemory(folder))
        self._blocks, self._is_cold = _blocks_read(), False

    def make_room(self, tokens: int) -> None:
        self.rows.add_room(tokens)

    def host_rows(self) -> PagedRows | None:
        """As for every store; None where rows are missing: a step in one call can't ask first."""
        self._look()
        return None if self._is_cold else super().host_rows()

    def _start(
        self, purpose: str, work: Callable[..., Result], query: torch.Tensor, ids: torch.Tensor
    ) -> Callable[[], Result]:
        rows = self.rows.paged_rows()
        if not query.is_cpu:
            self._look()

        def ask_first(query: torch.Tensor, ids: torch.Tensor) -> Result:
            if self._is_cold:
                ask_for(rows, ids)
            return work(query, ids)

        return super()._start(purpose, ask_first, query, ids)

    def _look(self) -> None:
        """Note whether the process has read from disks since the last look."""
        blocks = _blocks_read()
        self._blocks, self._is_cold = blocks, blocks - self._blocks > _FEW_BLOCKS

    @property
    def capture_obstacle(self) -> str | None:
        return "store='disk' attends on the CPU, whose work a CUDA graph can't replay"


def ask_for(rows: PagedRows, ids: torch.Tensor) -> None:
    """Have the system read the ``rows`` that ``ids [B, H, Q, k]`` name, without waiting for it."""
    row_bytes = rows.width * rows.dtype.itemsize
    kept = (ids >= 0) & (ids < rows.token_count)
    tokens = ids.clamp(0, rows.token_count - 1).long()
    pages = rows.table.long().gather(1, (tokens // rows.page_len).flatten(1)).view_as(tokens)
    heads = torch.arange(rows.heads).repeat_interleave(ids.shape[1] // rows.heads)
    slots = heads[:, None, None] * rows.page_len + tokens % rows.page_len
    first = (rows.addresses()[pages] + slots * row_bytes)[kept]
    ends = torch.stack([first // MEMORY_PAGE, (first + row_bytes - 1) // MEMORY_PAGE])
    # Memory pages that follow each other are asked for at once.
    numbers = ends.unique()
    breaks = (numbers.diff() > 1).nonzero().flatten() + 1
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for run in numbers.tensor_split(breaks.tolist()):
        if len(run):
            start, size = int(run[0]) * MEMORY_PAGE, int(run[-1] - run[0] + 1) * MEMORY_PAGE
            # Where the system refuses, reading works all the same.
            advise(start, size, mmap.MADV_WILLNEED)


def _blocks_read() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock
