"""Lookup of the choice for an operation and a size."""

from __future__ import annotations

import importlib
import threading
import warnings
from typing import Any, TypeVar

import torch

from hf_kvret_kernels.tuning.family import gpu_family
from hf_kvret_kernels.tuning.files import read_entries, shipped_file, user_file
from hf_kvret_kernels.tuning.tunable import Tunable

C = TypeVar("C")

# Modules with a Tunable called CHOICES. By name, because they import this package.
_MODULES = ("gather_attention", "gather_scores", "prompt_attention")

_tables: dict[torch.device, dict[tuple[str, Any], Any]] = {}
_lock = threading.Lock()


def choice(op: Tunable[C], size: Any, default: C, device: torch.device) -> C:
    """The tuned choice for ``op`` at ``size`` on the family of ``device``, else ``default``.

    The user's file overrides the package's. Both are read at the first call for a device; invalid
    entries are ignored, with one warning per file.
    """
    table = _tables.get(device)
    if table is None:
        table = _load(device)
    result: C | None = table.get((op.name, size)) if table else None
    return default if result is None else result


def operations() -> dict[str, Tunable[Any]]:
    """All tunable operations, by name."""
    modules = [importlib.import_module(f"hf_kvret_kernels.{name}.choices") for name in _MODULES]
    return {module.CHOICES.name: module.CHOICES for module in modules}


def reload() -> None:
    """Make the next call of ``choice`` read the files again."""
    with _lock:
        _tables.clear()


def _load(device: torch.device) -> dict[tuple[str, Any], Any]:
    with _lock:
        if device in _tables:
            return _tables[device]
        family, known_operations = gpu_family(device), operations()
        table: dict[tuple[str, Any], Any] = {}
        for path in (shipped_file(family), user_file(family)):
            entries, wrong = read_entries(path, family, known_operations)
            if wrong:
                more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                warnings.warn(
                    f"{path}: {wrong[0]}{more}. Kernels run as their rules say where it can't be "
                    "used; delete the file, or run `python examples/benchmarks/bench_launch.py "
                    "--device cuda` in a checkout, which writes it anew",
                    stacklevel=4,
                )
            table |= {(entry.op.name, entry.size): entry.choice for entry in entries}
        # null entries have overridden shipped ones and are no longer needed.
        _tables[device] = {key: value for key, value in table.items() if value is not None}
        return _tables[device]
