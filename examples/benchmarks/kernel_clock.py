"""How the benchmarks of kernels time: cold caches, turns, threads, and ways that must agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch

from hf_kvret.lab.bench.tables import ms
from hf_kvret.lab.bench.timing import StepClock, quartiles, synchronize
from hf_kvret.lab.evaluate.failures import CheckFailed
from hf_kvret.lab.evaluate.measurement import Measurement, Row
from hf_kvret.lab.report.results import Cell, Results

CALM_SECONDS = 0.015
_CPU_FLUSH_BYTES = 1 << 27
_CUDA_FLUSH_BYTES = 1 << 28
# About a millisecond of work on a large GPU, in which the host launches the call to be timed.
_CUDA_PASSES = 8
_CPU_SIDE = 1024
_CUDA_SIDE = 8192
_PRODUCT_REPEATS = 10


class CacheFlush:
    """Reads and writes a buffer larger than the caches, so that nothing of a call before is left.

    On CUDA it passes over it several times: while that runs, the host launches what follows, so
    that launches are not in the time between two events. On several threads of a CPU it waits until
    torch's are calm.
    """

    def __init__(self, device: torch.device) -> None:
        size, self._passes = _CPU_FLUSH_BYTES, 1
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            size, self._passes = max(_CUDA_FLUSH_BYTES, 2 * cache), _CUDA_PASSES
        self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        """Flush; on CUDA in the stream, without waiting."""
        for _ in range(self._passes):
            # Not zeros: such writes may go around a processor's caches and leave them as they are.
            self._buffer.add_(1)
        if self._buffer.device.type == "cpu" and torch.get_num_threads() > 1:
            wait_until_calm()


def wait_until_calm() -> None:
    """Let torch's threads come to rest: they spin for some milliseconds when they have done their
    part, and would be in the way of the compiled library's."""
    # Not asleep: a processor that slept is slow to begin with.
    calm = time.perf_counter() + CALM_SECONDS
    while time.perf_counter() < calm:
        pass


def time_calls(
    calls: Mapping[str, Callable[[], Any]],
    repeats: Mapping[str, int],
    before: Callable[[], Any],
    device: torch.device,
) -> dict[str, list[float]]:
    """Seconds of each call, ``repeats`` of it by name; ``before`` runs ahead of each, untimed.

    The calls take turns, each turn beginning with another one, so that all of them see the same
    moods of the machine; those of fewer repeats sit out turns in between. On CUDA nothing here
    waits for the device before the last call.
    """
    names, turns = list(calls), max(repeats.values())
    clocks = {name: StepClock(device) for name in names}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn * repeats[name] % turns < repeats[name]:
                before()
                clocks[name].mark()
                calls[name]()
                clocks[name].mark()
    # Every second interval is what lay between two calls.
    return {name: clock.seconds()[::2] for name, clock in clocks.items()}


def time_once(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What the call returned, and its seconds by the wall clock, until the device is done."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


@torch.inference_mode()
def measure_products(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Multiply-adds a second of square matrix products, in ``dtype`` and in fp32, by its name.

    The best of ten: a floor is what no way can undercut. Precision is torch's setting, by default
    without TF32.
    """
    side = _CUDA_SIDE if device.type == "cuda" else _CPU_SIDE
    rates = {}
    for kind in dict.fromkeys((dtype, torch.float32)):
        left, right = (torch.randn(side, side, dtype=kind, device=device) for _ in range(2))
        out = torch.empty_like(left)
        product = partial(torch.mm, left, right, out=out)
        product()
        # Factors may be wherever they are.
        seconds = time_calls({"": product}, {"": _PRODUCT_REPEATS}, int, device)[""]
        rates[str(kind).removeprefix("torch.")] = side**3 / min(seconds)
    return rates


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


def calls_row(seconds: Sequence[float]) -> Row:
    """``seconds``, the median, with quartiles and the least, of ``timed`` calls."""
    low, middle, high = quartiles(seconds)
    return {
        "seconds": middle,
        "seconds_quartiles": [low, high],
        "seconds_least": min(seconds),
        "timed": len(seconds),
    }


def spread(row: Row, text: Callable[[float], str] = ms) -> str:
    """The quartiles of ``calls_row``."""
    low, high = row["seconds_quartiles"]
    return f"{text(low)} to {text(high)}" if row["timed"] > 1 else "once"


def thread_count(count: int) -> str:
    """A number of threads in words."""
    return "1 thread" if count == 1 else f"{count} threads"
