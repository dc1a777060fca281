"""Clocks for a device, how fast its memory and its bus are, and what a step can't do without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.opponents import PreallocatedLayer
from hf_kvret.lab.bench.shapes import WeightBytes
from hf_kvret.lab.evaluate.measurement import Measurement, Row
from hf_kvret.lab.evaluate.usage import Usage, step_reads
from hf_kvret.lab.report.results import describe_environment

_REPEATS = 10
_CUDA_BYTES = 1 << 30
_CPU_BYTES = 1 << 27
_BUS_BYTES = 1 << 28


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Seconds between marks: CUDA events in the stream, or the wall clock on a CPU.

    Events cost no synchronization, so steps follow each other as they do in a generation that
    doesn't stop to look at its tokens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """The end of one interval and the beginning of the next."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The intervals, one fewer than marks; waits for the device."""
        synchronize(self._device)
        if self._device.type == "cuda":
            pairs = zip(self._events, self._events[1:], strict=False)
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second that were reached in this run.

    Attributes:
        device: reading and writing device memory.
        host: copying pinned host memory to the device; on a CPU the same as ``device``.
    """

    device: float
    host: float


@torch.inference_mode()
def measure_bandwidth(device: torch.device) -> Bandwidth:
    """The best of ten copies inside the memory (read and written bytes count) and ten sums over it.

    The best, not the median: a floor is what no step can undercut.
    """
    size = _CUDA_BYTES if device.type == "cuda" else _CPU_BYTES
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copies = 2 * size / _quickest(device, lambda: target.copy_(source))
    sums = size / _quickest(device, source.sum)
    if device.type != "cuda":
        return Bandwidth(max(copies, sums), max(copies, sums))
    pinned = torch.ones(_BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    arrival = torch.empty(_BUS_BYTES, dtype=torch.uint8, device=device)
    bus = _BUS_BYTES / _quickest(device, lambda: arrival.copy_(pinned, non_blocking=True))
    return Bandwidth(max(copies, sums), bus)


def quartiles(values: Sequence[float]) -> list[float]:
    """First quartile, median and third quartile, interpolated."""
    return np.quantile(values, (0.25, 0.5, 0.75)).tolist()


def describe(measurement: Measurement, options: Iterable[str], machine: Iterable[str]) -> Row:
    """For a set-up: the values of ``options``, and what the environment says of ``machine``."""
    here = describe_environment()
    return {name: getattr(measurement, name) for name in options} | {
        name: here[name] for name in machine
    }


def _quickest(device: torch.device, work: Callable[[], Any]) -> float:
    work()
    clock = StepClock(device)
    clock.mark()
    for _ in range(_REPEATS):
        work()
        clock.mark()
    return min(clock.seconds())


@dataclass(frozen=True)
class Floor:
    """Bytes that one forward pass must move.

    Attributes:
        device_bytes: read from, or written to, device memory.
        host_bytes: over the bus, from or to host memory.
    """

    device_bytes: float
    host_bytes: float

    def seconds(self, bandwidth: Bandwidth) -> float:
        """The time of both, one after the other, each at the bandwidth that was measured."""
        return self.device_bytes / bandwidth.device + self.host_bytes / bandwidth.host


class Selections(NamedTuple):
    """Rows that retrieval layers selected, summed over layers, batch and heads.

    ``bus_rows`` of them came over the bus from host memory; ``near_bytes`` and ``bus_bytes`` are
    those of the rows that didn't and did, as they are kept. All 0 for other caches.
    """

    rows: float = 0
    bus_rows: float = 0
    near_bytes: float = 0
    bus_bytes: float = 0

    def since(self, before: Selections, steps: int) -> Selections:
        """The selections since ``before``, per step of ``steps``."""
        pairs = zip(self, before, strict=True)
        return Selections(*((now - then) / steps for now, then in pairs))


def decode_floor(
    weights: WeightBytes,
    cache: Cache,
    usage: Usage,
    batch: int,
    selected: Selections,
    on_host: bool,
) -> Floor:
    """The bytes that a decode step reads at least, with the cache as it is now.

    The weights once for the whole batch, an embedding row for each sequence, and of the cache:

    - layers that hold keys and values: those of all tokens held, spare room left out. With
      ``on_host`` they come over the bus.
    - retrieval layers: sink and recent tokens, what a selection reads of the index, the keys that
      it compares in the store, and the keys and values of ``selected``, over the bus or not.
    - quantized caches, caches without layers and all other layers: what they hold.

    Args:
        usage: of the same cache.
        selected: what one step selects.
        on_host: the cache keeps its rows in host memory.
    """
    device = float(weights.read + batch * weights.row)
    if not isinstance(cache, RetrievalCache):
        # Caches that others wrote may have no layers.
        layers = [layer_kv_bytes(layer) for layer in getattr(cache, "layers", None) or (None,)]
        plain = [nbytes for nbytes in layers if nbytes is not None]
        read = sum(plain) if len(plain) == len(layers) else usage.device_bytes + usage.host_bytes
        return Floor(device, float(read)) if on_host else Floor(device + read, 0.0)
    device += cache.memory().other_layers
    bus = 0.0
    for reads in map(step_reads, cache.retrieval_layers):
        bus, device = bus + reads.bus, device + reads.near
    return Floor(device + selected.near_bytes, bus + selected.bus_bytes)


def round_floor(
    draft: Floor, drafts: int, weights: WeightBytes, usage: Usage, on_host: bool
) -> Floor:
    """The bytes for each token of a round: its ``drafts``, and a pass over all rows."""
    rows = float(usage.full_bytes)
    device = drafts * draft.device_bytes + weights.read + (0.0 if on_host else rows)
    host = drafts * draft.host_bytes + (rows if on_host else 0.0)
    return Floor(device / (drafts + 1), host / (drafts + 1))


def prefill_floor(weights: WeightBytes, usage: Usage, batch: int, context: int) -> Floor:
    """The bytes that a prompt moves at least: the weights are read, and the cache is written.

    A long prompt is bound by arithmetic, so time over this floor is large and says how far.
    """
    rows = batch * context * weights.row
    return Floor(float(weights.read + rows + usage.device_bytes), float(usage.host_bytes))


def layer_kv_bytes(layer: Any) -> int | None:
    """Bytes of keys and values of the tokens that ``layer`` holds; None where it isn't plain."""
    if getattr(layer, "keys", None) is None:
        return None
    both = layer.keys.nbytes + layer.values.nbytes
    if isinstance(layer, PreallocatedLayer):
        return both * layer.length // layer.capacity
    if isinstance(layer, StaticLayer):
        # A sliding layer counts on past its room.
        length = min(int(layer.get_seq_length()), layer.max_cache_len)
        return both * length // layer.max_cache_len
    # Quantized layers derive from these and hold only a part of their rows there.
    return both if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else None


def selections(cache: Cache) -> Selections:
    """The selections of a cache so far. It may wait for the device."""
    if not isinstance(cache, RetrievalCache):
        return Selections()
    rows, bus_rows, near_bytes, bus_bytes = 0, 0, 0, 0
    for counts, layer in zip(cache.stats()["layers"], cache.retrieval_layers, strict=True):
        rows += counts["selected"]
        kv, far = layer.kv, 0
        if kv is None or kv.store is None:
            continue
        if kv.store.over_bus:
            # A store that says what it missed has the other rows on the device.
            far = counts.get("misses", counts["selected"])
        window = kv.window
        row = kv.store.row_nbytes(window.row_dim * window.keys.element_size())
        bus_rows, bus_bytes = bus_rows + far, bus_bytes + far * row
        near_bytes += (counts["selected"] - far) * row
    return Selections(rows, bus_rows, near_bytes, bus_bytes)
