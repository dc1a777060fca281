"""Hints of the first cache: kernels that are missing, and a self-test for the GPU."""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path

import torch

from hf_kvret.observe.missing_kernels import log_missing_kernels
from hf_kvret.version import __version__

# The name under which users know the messages of a new cache.
_log = logging.getLogger("hf_kvret.cache")


def log_hints() -> None:
    """Log what the first cache of a process has to say of the machine, if anything."""
    log_missing_kernels()
    suggest_selftest()


def suggest_selftest() -> None:
    """Say that there is ``hf-kvret selftest``, for the first cache in a process that uses a GPU."""
    if torch.cuda.is_initialized() and _log.isEnabledFor(logging.WARNING):
        _suggest(torch.cuda.get_device_name())


@functools.cache
def _suggest(gpu: str) -> None:
    """Say it unless it was said on this machine, for this GPU and this version."""
    mark = _mark(gpu)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        # One of several processes makes it, and only that one says it.
        mark.touch(exist_ok=False)
    except FileExistsError:
        if mark.exists():
            return
    except OSError:
        # It is then said once in each process.
        pass
    _log.warning(
        "hf_kvret has not been used with %s on this machine yet: 'hf-kvret selftest --device cuda' "
        "checks in two minutes that it computes what it should. This is said once.",
        gpu,
    )


def _mark(gpu: str) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    name = re.sub(r"[^\w.-]+", "-", f"selftest-{__version__}-{gpu}")
    return Path(os.path.expanduser(folder)) / "hf_kvret" / name
