"""What a cache holds and reads at any length, from a few of its layers filled without contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.index import Scoring
from hf_kvret.lab.bench.floors import held_bytes, layer_floor
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.plan.blank import Blank
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.queries import AttentionCall
from hf_kvret.models.compatibility import latent_rank, layer_shape
from hf_kvret.observe.counters import counters_of
from hf_kvret.observe.reports import memory_report
from hf_kvret.options.config import byte_count

_META = torch.device("meta")
# Of layers that are alike, so many are filled. Where rows are predicted from the layer below, the
# first is another, the second stands for the rest, and those above it take over what it doesn't
# keep.
_ALONE, _CHAINED = 1, 4
_FULL_EVEN_LEN = 8192
_WHOLE = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)


@dataclass(frozen=True)
class Held:
    """Bytes of a filled cache, and what a decode step reads of it.

    Attributes:
        window: sink and recent tokens; of other caches and layers, everything.
        index: on the device.
        store_device: cold rows and page tables on the device.
        store_host: the same in host memory.
        shared: one copy for all sequences, on the device.
        read_device: bytes of a step that come from device memory, weights left out.
        read_bus: bytes of a step that cross the bus.
        read_cpu: bytes of a step that the CPU reads in host memory.
    """

    window: float = 0
    index: float = 0
    store_device: float = 0
    store_host: float = 0
    shared: float = 0
    read_device: float = 0
    read_bus: float = 0
    read_cpu: float = 0

    @property
    def device(self) -> float:
        """Bytes on the device."""
        return self.window + self.index + self.store_device + self.shared

    @property
    def host(self) -> float:
        """Bytes in host memory."""
        return self.store_host

    def plus(self, other: Held, factor: float = 1) -> Held:
        """Every number, with ``factor`` times that of ``other`` added."""
        return Held(
            **{name: value + factor * getattr(other, name) for name, value in vars(self).items()}
        )

    def of_batch(self, batch: int) -> Held:
        """Of ``batch`` sequences, where this is of one."""
        return Held(
            **{
                name: value if name == "shared" else batch * value
                for name, value in vars(self).items()
            }
        )


class Predictor:
    """``Held`` of one cache for one model at any length, for one sequence.

    Up to ``even_len`` tokens the cache's own code is run at that very length, on tensors without
    contents; beyond, at ``even_len`` and half as much again, and a line goes through both.

    Args:
        config: of the model.
        choice: of the cache.
        dtype: of keys and values.

    Raises:
        ValueError: a cache that this model can't have, or whose bytes depend on the machine.
    """

    def __init__(self, config: PreTrainedConfig, choice: CacheChoice, dtype: torch.dtype) -> None:
        self.config, self.choice, self.dtype = config, choice, dtype
        options = choice.options
        self.even_len = _FULL_EVEN_LEN if options is None else options.even_len
        if options is not None and options.retrieves:
            if options.splits_rows and options.device_budget is None:
                raise ValueError(
                    f"{choice.name}: store=split takes half of what is free where it runs: say how "
                    "much, as device_budget=8GB"
                )
            if options.store == "auto" and not options.splits_rows:
                raise ValueError(
                    f"{choice.name}: store=auto decides by what is free where it runs: name a "
                    "store, as store=host"
                )
        # Refuses what the model can't have.
        choice.make(config, self.even_len)
        self._known: dict[int, Held] = {}

    def at(self, length: int) -> Held:
        """What the cache holds after ``length`` tokens, and a step reads then."""
        if length <= self.even_len:
            return self._split(self._filled(length))
        low, high = self.even_len, self.even_len * 3 // 2
        first, last = self._filled(low), self._filled(high)
        share = (length - low) / (high - low)
        return self._split(first.plus(last.plus(first, -1), share))

    def _split(self, held: Held) -> Held:
        """With rows beyond ``device_budget`` moved to the host, and read there."""
        options = self.choice.options
        if options is None or not options.splits_rows or not held.store_device:
            return held
        assert options.device_budget is not None, "others were refused"
        far = max(0.0, held.store_device - byte_count(options.device_budget))
        # The selected rows are counted as if each were as likely to be far.
        near = held.read_bus * (1 - far / held.store_device)
        return held.plus(
            Held(
                store_device=-far,
                store_host=far,
                read_device=near,
                read_bus=-near,
            )
        )

    def _filled(self, length: int) -> Held:
        if length not in self._known:
            with torch.inference_mode(), Blank():
                self._known[length] = self._fill(length)
        return self._known[length]

    def _fill(self, length: int) -> Held:
        # One more is decoded, so that what the first step makes is there.
        cache = self._made(length + 1)
        groups = list(self._groups(cache))
        filled = _ALONE if self._indexed(cache) else _CHAINED
        numbers = sorted(number for group in groups for number in group[:filled])
        for start, count in ((0, length), (length, 1)):
            for number in numbers:
                self._pass(cache, number, start, count)
        total = Held()
        for group in groups:
            parts = [self._of_layer(cache, number) for number in group[:filled]]
            if len(group) > filled:
                parts = parts[:2]
            for part in parts:
                total = total.plus(part)
            total = total.plus(parts[-1], len(group) - len(parts))
        return total

    def _indexed(self, cache: Cache) -> bool:
        """Whether layers have nothing to do with each other."""
        if not isinstance(cache, RetrievalCache):
            return True
        return cache.make_index(cache.options, 0) is not None

    def _made(self, capacity: int) -> Cache:
        """The empty cache; on the meta device every kind of store keeps rows like these two."""
        options = self.choice.options
        if options is None or not (options.splits_rows or options.store == "cpu"):
            return self.choice.make(self.config, capacity)
        cache = self.choice.make(self.config, capacity)
        assert isinstance(cache, RetrievalCache)
        store = "device" if options.splits_rows else "host"
        changes: dict[str, Any] = {"store": store, "device_budget": None}
        if getattr(options, "rerank", None) == "cpu":
            changes["rerank"] = "auto"
        return type(cache)(config=self.config, options=cache.options.replace(**changes))

    def _groups(self, cache: Cache) -> Iterator[list[int]]:
        """Numbers of layers that are alike."""
        groups: dict[Any, list[int]] = {}
        for number, layer in enumerate(cache.layers):
            if isinstance(layer, (RetrievalLayer, *_WHOLE)):
                kind = type(layer), getattr(layer, "sliding_window", None)
                groups.setdefault((kind, layer_shape(self.config, number)), []).append(number)
        yield from groups.values()

    def _pass(self, cache: Cache, number: int, start: int, count: int) -> None:
        """Take ``count`` tokens into a layer, from slot ``start`` on."""
        layer, shape = cache.layers[number], layer_shape(self.config, number)
        rank = latent_rank(self.config)
        dims = (rank, shape.head_dim - rank) if rank else (shape.head_dim, shape.head_dim)
        keys, values = (self._rows(shape.kv_heads, count, dim) for dim in dims)
        given = layer.update(keys, values)
        if not isinstance(layer, RetrievalLayer):
            return
        query = self._rows(shape.heads, count, shape.head_dim)
        positions = torch.arange(start, start + count, device=_META)[None]
        out = partial(query.new_empty, (1, shape.heads, count, rank or shape.head_dim))
        scoring = Scoring(None, shape.head_dim**-0.5)
        layer.attend(query, *given, AttentionCall(scoring, out, positions=positions))

    def _rows(self, heads: int, count: int, dim: int) -> torch.Tensor:
        return torch.empty(1, heads, count, dim, dtype=self.dtype, device=_META)

    def _of_layer(self, cache: Cache, number: int) -> Held:
        layer, options = cache.layers[number], self.choice.options
        if not isinstance(layer, RetrievalLayer):
            nbytes = memory_report([layer], []).other_layers
            # A static layer counts its tokens in a tensor, and attends to its whole buffer.
            read = None if isinstance(layer, StaticLayer) else held_bytes(layer)
            return Held(window=nbytes, read_device=nbytes if read is None else read)
        report, floor = memory_report([layer], [layer]), layer_floor(layer)
        assert options is not None, "retrieval caches have some"
        near, far = floor.device_bytes, floor.host_bytes
        rows, over_bus = _selected_bytes(layer)
        # Of a split store ``_split`` says which rows are near. Those of a resident one may all be.
        if options.splits_rows or (over_bus and options.store != "resident"):
            far += rows
        else:
            near += rows
        device, host = report.store_device, report.store_host
        if options.store == "cpu":
            # Page tables, too. Nothing crosses the bus.
            parts = 0, host + device, report.shared, near, 0.0, far
        else:
            parts = device, host, report.shared, near, far, 0.0
        return Held(report.window, report.index, *parts)


def _selected_bytes(layer: RetrievalLayer) -> tuple[float, bool]:
    """Bytes of the rows that a step selects in a layer, and whether they lie in host memory."""
    regions = layer.regions
    if regions is None or regions.store is None or not layer.cold_len:
        return 0.0, False
    window, cold_len = regions.window, layer.cold_len
    # Rows to choose from, summed over heads; one step was taken.
    heads = counters_of(layer).cold_rows / cold_len
    count = cold_len if regions.index is None else layer.config.budget(cold_len)
    row = regions.store.row_nbytes(window.row_dim * window.keys.element_size())
    return heads * count * row, regions.store.bus_share > 0


def skipped_layers(config: PreTrainedConfig, cache: Cache) -> Sequence[int]:
    """Numbers of layers whose state is left out, as it does not grow: linear and recurrent ones."""
    kinds = (RetrievalLayer, *_WHOLE)
    return [number for number, layer in enumerate(cache.layers) if not isinstance(layer, kinds)]
