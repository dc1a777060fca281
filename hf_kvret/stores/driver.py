"""What CUDA's driver says of a GPU that torch does not."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_USES_HOST_POINTERS = 91
_BUS_ID_BYTES = 32


@cache
def reads_host_addresses(index: int) -> bool:
    """Whether memory that is registered has one address for the host and GPU ``index``.

    True where the driver can't be asked: nearly all GPUs on Linux do.
    """
    driver, device = _gpu(index)
    if driver is None:
        return True
    answer = ctypes.c_int(1)
    status = driver.cuDeviceGetAttribute(ctypes.byref(answer), _USES_HOST_POINTERS, device)
    return status != 0 or bool(answer.value)


def bus_id(index: int) -> str | None:
    """Where GPU ``index`` is on PCI, as ``"0000:ca:00.0"``; None if the driver can't be asked."""
    driver, device = _gpu(index)
    if driver is None:
        return None
    name = ctypes.create_string_buffer(_BUS_ID_BYTES)
    if driver.cuDeviceGetPCIBusId(name, _BUS_ID_BYTES, device) != 0:
        return None
    return name.value.decode().lower()


def _gpu(index: int) -> tuple[Any, ctypes.c_int]:
    """The driver, or None, and its handle of a GPU, counted as torch does."""
    device = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, device
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None, device
    return driver, device
