"""How the benches of kernels take their turns: sizes, threads, memory, and ways that must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch

from hf_kvret.benchmark.limits import available_host_memory
from hf_kvret.evaluation.measurement import CheckFailed, Measurement
from hf_kvret.evaluation.results import Cell, Results


class TimedTogether(Measurement):
    """Cells that differ in nothing but their cache are one size, and are timed in turns.

    So all of a size are measured where one of them waits.
    """

    def waiting(self, results: Results) -> list[Cell]:
        sizes = [size_of(cell) for cell in super().waiting(results)]
        return [cell for cell in self.cells() if size_of(cell) in sizes]

    def plan(self, results: Results) -> Iterator[Sequence[Cell]]:
        """A size after the other."""
        for _, group in groupby(self.waiting(results), key=size_of):
            yield list(group)


def size_of(cell: Cell) -> Cell:
    """A cell without its cache."""
    return {name: value for name, value in cell.items() if name != "cache"}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside, torch runs on ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_host_memory(needed: int) -> None:
    """MemoryError where less is free: a host that runs out has its processes killed."""
    free = available_host_memory()
    if needed > free:
        raise MemoryError(f"predicted: {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free")


def check_ways(
    run: Callable[[str], Any],
    ways: Iterable[str],
    reference: str,
    error: Callable[[Any, Any], float],
    tolerance: Callable[[str], float],
    of: str,
) -> dict[str, float]:
    """The errors of what ``ways`` return against that of ``reference``, which is left out.

    CheckFailed where one is above its tolerance; ``of`` says what was run.
    """
    want, errors = run(reference), {}
    for way in ways:
        if way != reference:
            errors[way] = error(run(way), want)
            # A comparison with NaN is false, so that NaN fails.
            if not errors[way] <= tolerance(way):
                raise CheckFailed(
                    f"{of}: {way} and {reference} differ by {errors[way]:.1e}; allowed are "
                    f"{tolerance(way):.1e}. Nothing was reported of them"
                )
    return errors
