"""Memory sizes: parsing texts such as 80GB, and the free memory of a device."""

from __future__ import annotations

import torch

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def byte_count(size: int | str) -> int:
    """Bytes of a size: a count, or a text such as ``90GB``, ``0.5 GiB`` or ``123``.

    Args:
        size: units are KB, MB, GB (powers of 1000) and KiB, MiB, GiB (of 1024), in any case.

    Raises:
        TypeError: neither an int nor a str.
        ValueError: a text that can't be parsed, or less than one byte.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"{size!r} is not a memory size: write 80GB, 75GiB, or bytes as an int")
    digits, unit = str(size).strip(), 1.0
    for name, factor in sorted(_UNITS.items(), key=lambda item: -len(item[0])):
        if digits.upper().endswith(name):
            digits, unit = digits[: -len(name)], factor
            break
    try:
        count = int(float(digits) * unit) if isinstance(size, str) else size
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"{size!r} is not a memory size: write 80GB, 75GiB, or bytes")
    return count


def free_bytes(device: torch.device) -> int | None:
    """Device memory that torch can still give out, its own cache included; None: not a GPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
