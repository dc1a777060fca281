"""What CUDA's driver says of a GPU that torch does not."""

from __future__ import annotations

import ctypes
from functools import cache

# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_USES_HOST_POINTERS = 91


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
