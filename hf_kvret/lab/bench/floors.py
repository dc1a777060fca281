"""The bytes that a step can't do without, and the time that they take at full bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.opponents import PreallocatedLayer
from hf_kvret.lab.bench.shapes import WeightBytes
from hf_kvret.lab.bench.timing import Bandwidth
from hf_kvret.lab.evaluate.usage import Usage, step_reads


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

    Stores that are split count as if all came over the bus, and ``host_share`` is the share of
    their rows that lies on the host now; ``since`` counts with it, as if every row were as likely
    to be selected.
    """

    rows: float = 0
    bus_rows: float = 0
    near_bytes: float = 0
    bus_bytes: float = 0
    host_share: float = 1

    def since(self, before: Selections, steps: int) -> Selections:
        """The selections since ``before``, per step of ``steps``."""
        bus_bytes = (self.bus_bytes - before.bus_bytes) / steps
        far_bytes = bus_bytes * self.host_share
        return Selections(
            (self.rows - before.rows) / steps,
            (self.bus_rows - before.bus_rows) / steps * self.host_share,
            (self.near_bytes - before.near_bytes) / steps + bus_bytes - far_bytes,
            far_bytes,
        )


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
    - quantized caches and all other layers: what they hold.

    Args:
        usage: of the same cache.
        selected: what one step selects.
        on_host: the cache keeps its rows in host memory.
    """
    device = float(weights.read + batch * weights.row)
    if not isinstance(cache, RetrievalCache):
        layers = [held_bytes(layer) for layer in cache.layers]
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


def held_bytes(layer: Any) -> int | None:
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
    """The selections of a cache so far. It waits for the device."""
    if not isinstance(cache, RetrievalCache):
        return Selections()
    rows, bus_rows, near_bytes, bus_bytes, on_host = 0, 0, 0, 0, 0.0
    for counts, layer in zip(cache.stats()["layers"], cache.retrieval_layers, strict=True):
        rows += counts["selected"]
        kv, far = layer.kv, 0
        if kv is None or kv.store is None:
            continue
        if kv.store.bus_share > 0.0:
            # A store that says what it missed has the other rows on the device.
            far = counts.get("misses", counts["selected"])
            on_host += far * kv.store.bus_share
        window = kv.window
        row = kv.store.row_nbytes(window.row_dim * window.keys.element_size())
        bus_rows, bus_bytes = bus_rows + far, bus_bytes + far * row
        near_bytes += (counts["selected"] - far) * row
    host_share = on_host / bus_rows if bus_rows else 1.0
    return Selections(rows, bus_rows, near_bytes, bus_bytes, host_share)
