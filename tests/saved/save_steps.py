"""The steps of a save, at each of which it can be made to fail or to be killed."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hf_kvret.saved import folder


def at_each_step(patch: pytest.MonkeyPatch, act: Callable[[int], object]) -> list[int]:
    """Have ``act`` called with its number before each step of a save; returns the numbers."""
    steps: list[int] = []

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            steps.append(len(steps))
            act(steps[-1])
            return real(*arguments)

        return step

    for name in ("fsync", "replace"):
        patch.setattr(folder.os, name, wrapped(getattr(os, name)))
    return steps


def killed_saves(
    root: Path, old: Callable[[Path], object], new: Callable[[Path], object]
) -> Iterator[Path]:
    """A folder for each step of ``new``, which was killed there after ``old`` had saved.

    In the last folder it came to its end.
    """
    for number in count():
        place = root / str(number)
        old(place)
        child = os.fork()
        if child == 0:
            at_each_step(pytest.MonkeyPatch(), partial(_kill_at, number))
            try:
                new(place)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        yield place
        if not os.WIFSIGNALED(status):
            return


def _kill_at(number: int, step: int) -> None:
    if step == number:
        os.kill(os.getpid(), signal.SIGKILL)
