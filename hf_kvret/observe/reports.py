"""Reports on a cache: bytes by part, and counts by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_kvret.layer.hybrid import foreign_layers_of
from hf_kvret.layer.indexed import IndexedLayer, indexer_nbytes
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.observe.observers import counters_of, subscriber
from hf_kvret.observe.recall import RecallMeter
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.stores import StoreChoice


@dataclass(frozen=True)
class MemoryReport:
    """Bytes, spare capacity included.

    Attributes:
        window: sink and recent tokens, on the device.
        index: the indexes, or keys of the model's own indexer, and sums of what is not selected,
            on the device.
        shared: calibrated tensors on the device, one copy for all caches of the process.
        store_device: cold rows and page tables on the device.
        store_host: cold rows in host memory.
        other_layers: sliding, linear and other layers that keep their own cache. Transformers keeps
            all keys of a prompt behind those of a sliding layer until its next token: not counted.
        full_attention: keys and values of the same tokens without retrieval, in all layers.
        snapshots: of layers that can't go back, in host memory.
    """

    window: int
    index: int
    shared: int
    store_device: int
    store_host: int
    other_layers: int
    full_attention: int
    snapshots: int = 0

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.window + self.index + self.shared + self.store_device + self.other_layers

    @property
    def host(self) -> int:
        """All bytes in host memory."""
        return self.store_host + self.snapshots

    def __str__(self) -> str:
        def mib(count: int) -> str:
            return f"{count / 2**20:.1f} MiB"

        return (
            f"device {mib(self.device)} (window {mib(self.window)}, index {mib(self.index)}, "
            f"shared {mib(self.shared)}, store {mib(self.store_device)}, "
            f"other layers {mib(self.other_layers)}), "
            f"host {mib(self.host)}; full attention {mib(self.full_attention)}"
        )


def memory_report(
    layers: list[Any], retrieval: list[RetrievalLayer], snapshots: int = 0
) -> MemoryReport:
    """The report over all ``layers``, of which ``retrieval`` are ours, and bytes of snapshots."""
    window = index = shared = device = host = full = 0
    for layer in retrieval:
        kv = layer.kv
        if kv is None:
            continue
        window += kv.window.nbytes() + kv.positions.nbytes()
        if isinstance(layer, IndexedLayer):
            index += layer.indexer.nbytes()
        if kv.index is not None:
            index += kv.index.nbytes()
            shared += kv.index.shared_nbytes()
        if kv.sums is not None:
            index += kv.sums.nbytes()
        if kv.store is not None:
            shared += kv.store.shared_nbytes()
            on_host = kv.store.host_nbytes()
            device, host = device + kv.store.nbytes() - on_host, host + on_host
        heads = kv.window.keys.shape[1]
        full += kv.batch_size * kv.length * heads * _row_bytes(layer) + indexer_nbytes(layer)
    held = pytree.tree_leaves([vars(part) for part in foreign_layers_of(layers).values()])
    other = sum(x.nbytes for x in held if isinstance(x, torch.Tensor))
    return MemoryReport(window, index, shared, device, host, other, full + other, snapshots)


def cache_stats(
    layers: list[RetrievalLayer], method: str, stores: StoreChoice, dense: str | None
) -> dict[str, Any]:
    """Counts of a cache with the retrieval ``layers``, whose stores ``stores`` chose.

    Returns ``method``, ``store`` (None: not needed yet), ``store_reason`` (of ``"auto"``),
    ``dense`` (why nothing was retrieved; None if something was) and ``layers``: for each
    retrieval layer its number ``layer``, and what ``layer_stats`` counts.
    """
    return {
        "method": method,
        "store": stores.name,
        "store_reason": stores.reason,
        "dense": dense,
        "layers": [{"layer": layer.layer_info.number, **layer_stats(layer)} for layer in layers],
    }


def layer_stats(layer: RetrievalLayer) -> dict[str, Any]:
    """Counts of one retrieval layer since the last reset.

    Returns a dict with ``steps`` (selections), ``borrowed`` (those that another layer made, see
    ``select_every``), ``queries``, ``cold_tokens`` held, ``candidates`` (tokens scored closely) and
    ``selected`` (rows read by selection), both summed over batch, heads and queries, ``cold_rows``
    (rows there were to choose from, summed alike), ``read_ratio = selected / cold_rows``,
    ``exact_rows`` (rows read by exact attention of long second prompts), ``bytes_fetched``, and
    with ``track_recall`` the means ``recall_overlap``, ``recall_mass``, ``recall_best_mass`` and
    ``lost_mass`` (see ``Recall``; without it ``lost_mass`` is None). ``prompt_retrieved`` is the
    number of tokens that were read with ``prompt="retrieve"``, where there were some.
    """
    counters, selected = counters_of(layer), layer.selected
    rows, row_bytes = selected + layer.exact_rows, _row_bytes(layer)
    if layer.kv is not None and layer.kv.store is not None:
        row_bytes = layer.kv.store.row_nbytes(row_bytes)
    stats: dict[str, Any] = {
        "steps": counters.steps,
        "borrowed": 0 if layer.lender is None else counters.steps,
        "queries": counters.queries,
        "cold_tokens": layer.cold_len,
        "candidates": counters.candidates,
        "selected": selected,
        "cold_rows": counters.cold_rows,
        "read_ratio": selected / counters.cold_rows if counters.cold_rows else 0.0,
        "exact_rows": layer.exact_rows,
        "bytes_fetched": rows * row_bytes,
        "lost_mass": None,
    }
    if layer.kv is not None:
        for part in (layer.kv.index, layer.kv.store, layer.kv.retrieved):
            stats |= {} if part is None else part.stats()
    recall = subscriber(layer, RecallMeter)
    return stats if recall is None else stats | recall.means()


def dense_reason(layers: list[RetrievalLayer], options: RetrievalConfig, name: str) -> str | None:
    """Why the ``layers`` of the cache ``name`` never retrieved, where they are too short for it."""
    length = max(layer.get_seq_length() for layer in layers)
    active = any(counters_of(layer).steps or layer.cold_len for layer in layers)
    if active or not length or not options.retrieves:
        return None
    why = f"it attends to all tokens below dense_below={options.dense_len}, and held {length}"
    if length >= options.dense_len:
        window = f"sink={options.sink}, recent={options.recent}, flush={options.flush}"
        why = f"its {length} tokens fit into the window ({window})"
    return f"{name} retrieved nothing: {why}"


def _row_bytes(layer: RetrievalLayer) -> int:
    """Bytes of one token's row in one KV head."""
    if layer.kv is None:
        return 0
    window = layer.kv.window
    return window.row_dim * window.keys.element_size()
