"""What ends a cell and leaves the others: wrong results, code of others that fails, full memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from hf_kvret.lab.report.results import FAILED


class CheckFailed(RuntimeError):
    """The object of a measurement gives wrong results; the message says which, and by how much."""


def attempt(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """``(work(), {})``, or None and what a row says instead of numbers. Memory is freed after it.

    That is ``out_of_memory`` or ``check_failed``; other errors are raised.
    """
    result, why = None, {}
    try:
        result = work()
    except CheckFailed as error:
        why = {FAILED: str(error)}
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        why = {"out_of_memory": f"out of memory ({first_line(error)})"}
    # Outside the handler: its traceback would keep the tensors of the failed run. Collecting takes
    # long beside a small run, and matters where memory is scarce.
    if why or torch.cuda.is_available():
        gc.collect()
        # A device that has failed says so at its next work; here it would take the result along.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return result, why


def first_line(error: Exception) -> str:
    """The first line of an error's text; of one without a text its type."""
    return next(iter(str(error).strip().splitlines()), repr(error))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch has no class of its own for a host that can't allocate, for pinned memory, and for what
    # CUDA's libraries can't get.
    message = str(error)
    signs = ("DefaultCPUAllocator", "ALLOC_FAILED", "out of memory")
    return any(sign in message for sign in signs)
