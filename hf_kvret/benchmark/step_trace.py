"""A trace of torch's profiler, read as time and launches of the parts of a step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_kvret.benchmark.step_parts import OTHER, RANGE_PREFIX
from hf_kvret.benchmark.timing import synchronize

# Work on the device, which says by its correlation which call on the host launched it.
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass
class PartTime:
    """Seconds and launches (on a CPU: operations) of one part."""

    seconds: float = 0.0
    launches: int = 0


def profile(work: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """The events of a Chrome trace of ``work``, times in microseconds."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        work()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())["traceEvents"]


def part_times(events: Iterable[dict[str, Any]]) -> dict[str, PartTime]:
    """Time and launches by part.

    A kernel belongs to the innermost range that was open on the host when it was launched. Where a
    trace has no kernels, as on a CPU, operations stand for them, each without those that it calls.
    """
    known = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in known if event.get("cat") in _DEVICE_WORK]
    times: dict[str, PartTime] = {}
    for name, microseconds in _of_kernels(known, kernels) if kernels else _of_ops(known):
        part = times.setdefault(name, PartTime())
        part.seconds += microseconds / 1e6
        part.launches += 1
    return times


def _of_kernels(
    events: list[dict[str, Any]], kernels: list[dict[str, Any]]
) -> Iterator[tuple[str, float]]:
    """Part and microseconds of each kernel, copy and fill."""
    launched = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    took: dict[int, list[float]] = {}
    for kernel in kernels:
        took.setdefault(kernel["args"].get("correlation", -1), []).append(kernel["dur"])
    calls = [dict(launched[number], took=took[number]) for number in took if number in launched]
    for part, call, _ in _swept([*_ranges(events), *calls]):
        for microseconds in call["took"]:
            yield part, microseconds
    for number in took:
        if number not in launched:
            for microseconds in took[number]:
                yield OTHER, microseconds


def _of_ops(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Part and microseconds of each operation, less the operations inside it."""
    ops = [
        event
        for event in events
        if event.get("cat") == "cpu_op" and not event["name"].startswith("profiler::")
    ]
    for part, _, microseconds in _swept([*_ranges(events), *ops]):
        yield part, microseconds


def _ranges(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        event
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(RANGE_PREFIX)
    ]


def _swept(events: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Of each event that is no range: the innermost range around it, and its own microseconds.

    Events of a thread lie inside each other or apart; the time of inner ones is not their outer's.
    """
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        by_thread.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for mine in by_thread.values():
        mine.sort(key=lambda event: (event["ts"], -event["dur"]))
        inner = [0.0] * len(mine)
        parts = [OTHER] * len(mine)
        around: list[int] = []
        for number, event in enumerate(mine):
            while around and mine[around[-1]]["ts"] + mine[around[-1]]["dur"] <= event["ts"]:
                around.pop()
            is_range = event.get("cat") == "user_annotation"
            if is_range:
                parts[number] = event["name"].removeprefix(RANGE_PREFIX)
            elif around:
                parts[number] = parts[around[-1]]
            holder = next(
                (n for n in reversed(around) if mine[n].get("cat") != "user_annotation"), None
            )
            if holder is not None and not is_range:
                inner[holder] += event["dur"]
            around.append(number)
        for number, event in enumerate(mine):
            if event.get("cat") != "user_annotation":
                yield parts[number], event, max(0.0, event["dur"] - inner[number])
