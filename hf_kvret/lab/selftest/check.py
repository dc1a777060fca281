"""A check of the self-test, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GROUPS = {
    "kernels": "each operation beside the same in plain torch, in the dtypes of the device",
    "steps": "decode steps as they run here, beside slower ones: without graph, in torch",
    "memory": "rows read over the bus by their address, and copies while the GPU is busy",
    "caches": "each method and store: tokens of full attention, after a flush, a crop, a load",
}
"""What is checked, in this order."""

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_LONGEST = 300


class Skip(Exception):
    """Raised by a check that can't be made here; says why."""


@dataclass(frozen=True)
class Check:
    """Something that must hold.

    Attributes:
        group: one of ``GROUPS``.
        name: of the check within its group.
        run: raises ``Skip`` where it can't be made, AssertionError or whatever the code raises
            where it fails; returns a detail, such as the largest error.
        remedy: the option that avoids what failed.
    """

    group: str
    name: str
    run: Callable[[], str]
    remedy: str


@dataclass(frozen=True)
class Verdict:
    """What became of a check.

    Attributes:
        group, name, remedy: of the check.
        status: ``PASSED``, ``FAILED`` or ``SKIPPED``.
        detail: the error, the reason, or what was found.
        seconds: that it took.
    """

    group: str
    name: str
    status: str
    detail: str
    remedy: str
    seconds: float


def run_check(check: Check) -> Verdict:
    """Run a check; whatever it raises becomes a verdict."""
    start, status = time.perf_counter(), PASSED
    try:
        detail = check.run()
    except Skip as reason:
        status, detail = SKIPPED, without_folders(str(reason))
    # Whatever a kernel, a driver or a compiler raises is what the test is there to find.
    except Exception as error:
        status, detail = FAILED, without_folders(f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    return Verdict(check.group, check.name, status, detail, check.remedy, seconds)


def without_folders(text: str) -> str:
    """One line of an error, in which ``~`` stands for the user's folder."""
    line = " ".join(text.split()).replace(str(Path.home()), "~")
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."
