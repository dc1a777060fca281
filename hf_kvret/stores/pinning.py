"""Pinned host memory of an exact size, unpinned when it is freed; what CUDA's driver says of it."""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from hf_kvret.contracts.chunks import finish_reading
from hf_kvret.stores.host_memory import mapped

_MEMORY_PAGE = 4096
# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_USES_HOST_POINTERS = 91
# CU_STREAM_CAPTURE_MODE_RELAXED
_RELAXED = 2


def pinned(shape: tuple[int, ...], dtype: torch.dtype, stream: torch.cuda.Stream) -> torch.Tensor:
    """Pinned memory of exactly this shape, in its own memory pages; unpinned with the tensor.

    Callers must keep the tensor itself, not just a view of it.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        stream: that copies to it; unpinning waits for it.

    Raises:
        MemoryError: there is no such memory, or it can't be pinned.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    raw = mapped(-(-nbytes // _MEMORY_PAGE) * _MEMORY_PAGE, inherited=False)
    # A capture that makes a chunk of its own fails: it should have its chunks before.
    capturing = torch.cuda.is_current_stream_capturing()
    with nullcontext() if capturing else _beside_captures():
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
    with _beside_captures(), torch.cuda.device(stream.device):
        stream.synchronize()
        torch.cuda.current_stream(stream.device).synchronize()
        finish_reading(stream.device)
        torch.cuda.cudart().cudaHostUnregister(address)


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Context for registering memory, and waiting, that breaks no capture of another thread.

    CUDA counts these among the calls that may be unsafe while a stream is captured. Our captures
    forbid them to their own thread alone (``capture_error_mode="thread_local"`` in
    ``replay.recorders``). But torch's default is "global": such a call in any thread makes the
    capture invalid, unless the caller's mode is relaxed, as in here. It puts no work on a stream,
    so a graph loses nothing by it.
    """
    driver = _driver()
    if driver is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    # Each call gives the mode before it.
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@cache
def _driver() -> Any:
    """CUDA's driver; None where there is none, or none that knows modes of captures."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if hasattr(driver, "cuThreadExchangeStreamCaptureMode") else None


@cache
def reads_host_addresses(index: int) -> bool:
    """Whether memory that is registered has one address for the host and GPU ``index``.

    True where the driver can't be asked: nearly all GPUs on Linux do.
    """
    device, answer = ctypes.c_int(), ctypes.c_int(1)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return True
    status = driver.cuDeviceGetAttribute(ctypes.byref(answer), _USES_HOST_POINTERS, device)
    return status != 0 or bool(answer.value)
