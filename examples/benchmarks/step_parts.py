"""Which part of a decode step is at work, and a trace read as time and launches of the parts.

Parts are named while a benchmark looks, at no cost otherwise.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.benchmark.timing import synchronize
from hf_kvret.cache import RetrievalCache
from hf_kvret.core import selected_attention
from hf_kvret.core.layer import RetrievalLayer
from hf_kvret_kernels.merge import Pieces

WEIGHTS, NORMS, WINDOW = "weights", "norms", "window"
SELECT, STORE, MERGE = "index", "store", "merge"
CACHE, ATTENTION, OTHER = "cache, rest", "attention, rest", "other"
PARTS = (WEIGHTS, NORMS, WINDOW, SELECT, STORE, MERGE, CACHE, ATTENTION, OTHER)
"""Parts of a step: matrices of the model; norms; attention over the window, and where the store's
part is at hand already the merge of both; finding tokens; reading and attending to them; merging
the two elsewhere; what else a retrieval layer does; what else the model's attention does
(rotations, and all of it where the cache does not retrieve); all the rest."""

_RANGE_PREFIX = "hf_kvret.part/"
# Work on the device, which says by its correlation which call on the host launched it.
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGE = "user_annotation"

Event = dict[str, Any]


class Parts:
    """Names the part at work: in ``now``, and as a range of torch's profiler.

    Attributes:
        now: the innermost part that is open, ``OTHER`` outside of all.
    """

    def __init__(self) -> None:
        self._open: list[str] = []

    @property
    def now(self) -> str:
        return self._open[-1] if self._open else OTHER

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """The part ``name`` is at work."""
        self._open.append(name)
        try:
            with torch.profiler.record_function(_RANGE_PREFIX + name):
                yield
        finally:
            self._open.pop()

    def wrap(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``work`` as part ``name``, and a function that it returns too, as ``Store.begin`` does.

        Inside the store it stays the store's.
        """

        @wraps(work)
        def named(*args: Any, **kwargs: Any) -> Any:
            if self.now == STORE:
                return work(*args, **kwargs)
            with self.named(name):
                result = work(*args, **kwargs)
            # Of pieces nothing is left to be done, and what merges them must know them.
            left = callable(result) and not isinstance(result, Pieces)
            return self.wrap(result, name) if left else result

        return named

    @contextmanager
    def watching(self, model: PreTrainedModel, cache: Cache) -> Iterator[None]:
        """Context in which forward passes of ``model`` with the filled ``cache`` name their parts.

        Methods are wrapped meanwhile: take steps as they are, not through a ``DecodeGraph``.
        """
        with ExitStack() as stack:
            for owner, method, name in _methods(model, cache):
                wrapped = self.wrap(getattr(owner, method), name)
                stack.enter_context(patch.object(owner, method, wrapped))
            yield


def _methods(model: PreTrainedModel, cache: Cache) -> Iterator[tuple[Any, str, str]]:
    """What works on a part of its own: object or class, method, part."""
    for module in model.modules():
        part = _module_part(module)
        if part is not None:
            yield module, "forward", part
    if not isinstance(cache, RetrievalCache):
        return
    yield RetrievalLayer, "attend", CACHE
    yield selected_attention, "attend_all", STORE
    yield selected_attention, "prompt_pieces", WINDOW
    yield selected_attention, "step_attention", WINDOW
    yield selected_attention, "merge", MERGE
    for layer in cache.retrieval_layers:
        if layer.regions is not None and layer.regions.store is not None:
            if layer.regions.index is not None:
                yield layer.regions.index, "search", SELECT
                yield layer.regions.index, "after_search", SELECT
            yield layer.regions.store, "begin", STORE


def _module_part(module: nn.Module) -> str | None:
    """By what the module is: a matrix, a norm, an attention, or none of these."""
    weight = getattr(module, "weight", None)
    leaf = isinstance(weight, torch.Tensor) and not any(True for _ in module.children())
    if leaf and not isinstance(module, nn.Embedding):
        assert isinstance(weight, torch.Tensor)
        return WEIGHTS if weight.ndim == 2 else NORMS
    return ATTENTION if type(module).__name__.endswith("Attention") else None


@dataclass
class PartTime:
    """Seconds and launches (on a CPU: operations) of one part."""

    seconds: float = 0.0
    launches: int = 0


def profile(work: Callable[[], Any], device: torch.device) -> list[Event]:
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


def part_times(events: Iterable[Event]) -> dict[str, PartTime]:
    """Time and launches by part.

    A kernel belongs to the innermost range that was open on the host when it was launched. Where a
    trace has no kernels, as on a CPU, operations stand for them, each without those that it calls.
    """
    by_kind: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            by_kind[event.get("cat", "")].append(event)
    ranges = [one for one in by_kind[_RANGE] if one["name"].startswith(_RANGE_PREFIX)]
    took: dict[int, list[float]] = defaultdict(list)
    for kernel in (one for kind in _DEVICE_WORK for one in by_kind[kind]):
        took[kernel["args"].get("correlation", -1)].append(kernel["dur"])
    times: dict[str, PartTime] = defaultdict(PartTime)

    def count(part: str, microseconds: float) -> None:
        times[part].seconds += microseconds / 1e6
        times[part].launches += 1

    if not took:
        ops = [one for one in by_kind["cpu_op"] if not one["name"].startswith("profiler::")]
        for part, _, microseconds in _inside([*ranges, *ops]):
            count(part, microseconds)
        return dict(times)
    launches = {
        one["args"]["correlation"]: one
        for kind in _LAUNCHES
        for one in by_kind[kind]
        if one.get("args", {}).get("correlation") in took
    }
    for part, launch, _ in _inside([*ranges, *launches.values()]):
        for microseconds in took.pop(launch["args"]["correlation"]):
            count(part, microseconds)
    # Launched before the trace began.
    for microseconds in (one for kernels in took.values() for one in kernels):
        count(OTHER, microseconds)
    return dict(times)


def _inside(events: list[Event]) -> list[tuple[str, Event, float]]:
    """Of each event that is no range: the innermost range around it, and its own microseconds.

    Events of a thread lie inside each other or apart; the time of inner ones is not their outer's.
    """
    found: list[tuple[str, Event]] = []
    own = {id(event): event["dur"] for event in events}
    around: dict[Any, list[tuple[str, Event]]] = defaultdict(list)
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        outer = around[event.get("pid"), event.get("tid")]
        while outer and outer[-1][1]["ts"] + outer[-1][1]["dur"] <= event["ts"]:
            outer.pop()
        part = outer[-1][0] if outer else OTHER
        if event["cat"] == _RANGE:
            part = event["name"].removeprefix(_RANGE_PREFIX)
        else:
            found.append((part, event))
            caller = next((one for _, one in reversed(outer) if one["cat"] != _RANGE), None)
            if caller is not None:
                own[id(caller)] -= event["dur"]
        outer.append((part, event))
    return [(part, event, max(0.0, own[id(event)])) for part, event in found]
