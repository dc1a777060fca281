"""Bytes that a cache holds and that a decode step reads of it, and rows that decoding read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.held import Held, held_bytes
from hf_kvret.layer.indexed import indexer_nbytes
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.models.compatibility import layer_shapes


@dataclass(frozen=True)
class Usage:
    """Bytes that a cache holds, and rows that its decoding read.

    Attributes:
        device_bytes, host_bytes: held now, spare capacity included, mapped files left out.
        full_bytes: keys and values of all tokens, uncompressed.
        rows_read: cold rows that decoding read, summed over layers, heads and queries; those that
            long questions read exactly included.
        rows_cold: cold rows there were to read, summed alike.
        step_bytes: bytes of the cache that its next decode step reads: keys and values, or what
            stands for them; for retrieval see ``StepReads``.
    """

    device_bytes: int
    host_bytes: int
    full_bytes: int
    rows_read: int
    rows_cold: int
    step_bytes: int

    @property
    def read_ratio(self) -> float | None:
        """Share of the cold rows that was read; None before anything was cold."""
        return self.rows_read / self.rows_cold if self.rows_cold else None


class StepReads(NamedTuple):
    """Bytes that the next decode step reads of a retrieval layer.

    Attributes:
        near: the window, keys of the model's own indexer, the mean of what is not selected, what a
            search reads of the index, and the keys that it compares, where these lie on the device.
        bus: the keys that it compares over the bus.
        rows: the selected rows as they are kept, wherever that is.
    """

    near: float = 0
    bus: float = 0
    rows: float = 0


def step_reads(layer: RetrievalLayer) -> StepReads:
    """The reads of the next step, with the layer as it is now."""
    kv = layer.kv
    if kv is None:
        return StepReads()
    keys, values = kv.window.tokens()
    cost = kv.search_cost()
    near = keys.nbytes + values.nbytes + indexer_nbytes(layer) + cost.nbytes
    near += 0 if kv.sums is None else kv.sums.mean_nbytes()
    if kv.store is None or not kv.cold_len:
        return StepReads(near)
    plain = kv.window.row_dim * keys.element_size()
    row, heads = kv.store.row_nbytes(plain), keys.shape[0] * keys.shape[1]
    # A selection compares stored keys with the query; coded rows are read in whole.
    key = keys.shape[3] * keys.element_size() if row == plain else row
    compared = cost.keys_read * heads * key
    far, count = compared if kv.store.over_bus else 0, kv.cold_len
    # Without an index all tokens count, whatever the budget is.
    if kv.index is not None or layer.config.follows_model:
        count = layer.config.budget(count)
    return StepReads(near + compared - far, far, heads * count * row)


def usage_of(
    cache: Cache, model: PreTrainedModel, length: int, *, batch: int = 1, on_host: bool = False
) -> Usage:
    """The usage of ``cache`` after ``length`` tokens of each of ``batch`` sequences.

    ``on_host``: its rows lie in host memory whatever device their tensors name.
    """
    if isinstance(cache, RetrievalCache):
        memory, layers = cache.memory(), cache.stats()["layers"]
        return Usage(
            memory.device,
            memory.host,
            memory.full_attention,
            sum(layer["selected"] + layer["exact_rows"] for layer in layers),
            sum(layer["cold_rows"] + layer["exact_rows"] for layer in layers),
            memory.other_layers + round(sum(sum(step_reads(x)) for x in cache.retrieval_layers)),
        )
    held = Held(0, 0, 0) if not hasattr(cache, "update") else held_bytes(cache, model)
    device, host = (0, held.device + held.host) if on_host else (held.device, held.host)
    width = sum(shape.width for shape in layer_shapes(model.config))
    full = 2 * batch * length * width * model.dtype.itemsize
    # All rows that are left are read, whatever their encoding; a press leaves fewer.
    rows = getattr(cache, "get_seq_length", lambda: length)()
    return Usage(device, host, full, int(rows), length, device + host)
