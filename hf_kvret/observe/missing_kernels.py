"""A warning where nothing but torch does the work of the C++ kernels."""

from __future__ import annotations

import functools
import logging

import torch

from hf_kvret_kernels import host_attention

# The name under which users know the warning.
_log = logging.getLogger("hf_kvret.cache")


@functools.cache
def log_missing_kernels() -> None:
    """Warn once a process where decode steps lack the C++ kernels, and no GPU does their work."""
    reason = host_attention.why_not()
    # Where there are kernels, nobody looks for a GPU.
    if reason and not torch.cuda.is_available():
        _log.warning(
            "decode steps on this CPU are slower than they could be: torch stands in for the C++ "
            "kernels, and takes 2 to 6 times as long for attention to the selected tokens. %s",
            reason,
        )
