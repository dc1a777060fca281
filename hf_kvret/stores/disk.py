"""DiskStore: rows in files of a folder, mapped, for contexts that don't fit into memory."""

from __future__ import annotations

import errno
import math
import os
import tempfile

import torch

from hf_kvret.contracts.state import is_mapped
from hf_kvret.stores.cpu import CpuStore
from hf_kvret.stores.host_memory import expect_random_reads
from hf_kvret.stores.memory import CPU, PageMemory

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        expect_random_reads(rows)
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


def check_folder(folder: str) -> None:
    """ValueError where there is no such folder, or the system has no files that this needs."""
    if not os.path.isdir(folder):
        raise ValueError(f"disk={folder!r}: there is no such folder, make it")
    if not hasattr(os, "posix_fallocate") or not os.path.isdir("/proc/self/fd"):
        raise ValueError("store='disk' needs Linux: take store='cpu' or 'higgs' here")
