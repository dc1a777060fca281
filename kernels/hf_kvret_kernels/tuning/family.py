"""Which GPUs share measurements."""

from __future__ import annotations

import re

import torch

INTERPRETER = "interpreter"
_VENDOR = {"nvidia", "amd", "geforce", "tesla", "quadro", "instinct", "gpu"}
_MEMORY = re.compile(r"\d+gb|hbm\d\w*")


def gpu_family(device: torch.device) -> str:
    """For example ``"sm90-h200"``: compute capability, and the name without vendor and memory size.

    ``"interpreter"`` for other devices than GPUs: Triton kernels run interpreted there, and have
    choices only for tests. Does not synchronize with the device.
    """
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return family_of(torch.cuda.get_device_name(device), major, minor)


def family_of(name: str, major: int, minor: int) -> str:
    """The family of a GPU called ``name`` with compute capability ``major.minor``."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    parts = [word for word in words if word not in _VENDOR and not _MEMORY.fullmatch(word)]
    return "-".join([f"sm{major}{minor}", *parts])
