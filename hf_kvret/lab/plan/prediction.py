"""Bytes that a cache holds and reads at any length, from a few layers filled without contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.filling import attend, update_indexer
from hf_kvret.lab.bench.timing import layer_kv_bytes
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.usage import step_reads
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.layer.snapshots import is_stuck
from hf_kvret.models.compatibility import layer_shape
from hf_kvret.models.versions import DummyLayer
from hf_kvret.observe.reports import memory_report
from hf_kvret.stores import READ_BY_CPU

_META = torch.device("meta")
# So many of the layers that are alike are filled. In a chain rows are predicted from the layer
# below: the first layer is another, the second stands for all others, and those above it take over
# the rows that it doesn't keep.
_ALONE, _CHAINED = 1, 4
_FULL_EVEN_LEN = 8192
_WHOLE = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)
_SCALARS = {"__bool__": False, "__int__": 0, "__index__": 0, "__float__": 0.0, "item": 0}


class Blank(TorchFunctionMode):
    """A context for tensors that have shapes and no contents, on torch's meta device.

    Nothing in them is padded, NaN or infinite: ``all`` and ``isfinite`` of a whole tensor say True,
    ``any`` says False, ``nonzero`` finds nothing, other values are 0, copies on the CPU too.
    Tensors on other devices have their own values.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else None
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            name = getattr(func, "__name__", "")
            if name in _SCALARS:
                return _SCALARS[name]
            if name == "nonzero":
                indices = tensor.new_empty((0, tensor.ndim), dtype=torch.long)
                return indices.unbind(1) if kwargs.get("as_tuple") else indices
            if name == "cpu":
                return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            if name in ("all", "any") and len(args) == 1 and not kwargs:
                return torch.tensor(name == "all")
            if name == "isfinite" and not tensor.ndim:
                return torch.tensor(True)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes that a filled cache holds, and that a decode step reads.

    Attributes:
        window: sink and recent tokens, and all tokens of layers without a store.
        index: on the device.
        store_device: cold rows and page tables on the device.
        store_host: the same in host memory, and snapshots of layers that can't go back.
        shared: one copy for all sequences, on the device.
        read_device: bytes that a step reads in device memory, weights left out.
        read_bus: bytes that a step reads over the bus.
        read_cpu: bytes that the CPU reads in host memory in a step.
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

    def plus(self, other: CacheBytes, factor: float = 1) -> CacheBytes:
        """The sum with ``factor`` times ``other``."""
        return CacheBytes(
            **{name: value + factor * getattr(other, name) for name, value in vars(self).items()}
        )

    def of_batch(self, batch: int) -> CacheBytes:
        """Those of ``batch`` sequences, from those of one."""
        return replace(CacheBytes().plus(self, batch), shared=self.shared)


class Predictor:
    """The ``CacheBytes`` of one cache for one model at any length, for one sequence.

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
        if options is not None and options.retrieves and options.store == "auto":
            raise ValueError(
                f"{choice.name}: store=auto decides by what is free where it runs: name a store, "
                "as store=host"
            )
        # This refuses caches that the model can't have.
        choice.make(config, self.even_len)
        self._filled: dict[int, CacheBytes] = {}

    def at(self, length: int) -> CacheBytes:
        """Bytes after ``length`` tokens, and those that a step reads then."""
        if length <= self.even_len:
            return self._fill(length)
        low, high = self.even_len, self.even_len * 3 // 2
        first, last = self._fill(low), self._fill(high)
        return first.plus(last.plus(first, -1), (length - low) / (high - low))

    def _fill(self, length: int) -> CacheBytes:
        if length not in self._filled:
            with torch.inference_mode(), Blank():
                self._filled[length] = self._measure(length)
        return self._filled[length]

    def _measure(self, length: int) -> CacheBytes:
        # One more token is decoded, so that the buffers of a first step are there.
        cache = self._make(length + 1)
        groups = list(self._groups(cache))
        chained = isinstance(cache, RetrievalCache) and not cache.make_index(cache.options, 0)
        count = _CHAINED if chained else _ALONE
        layers = {layer for group in groups for layer in group[:count]}
        lenders = (getattr(cache.layers[layer], "lender", None) for layer in layers)
        layers |= {lender.number for lender in lenders if lender is not None}
        for start, tokens in ((0, length), (length, 1)):
            for layer in sorted(layers):
                self._pass(cache, layer, start, tokens)
        total = CacheBytes()
        for group in groups:
            sizes = [self._layer_bytes(cache, layer) for layer in group[:count]]
            if len(group) > count:
                sizes = sizes[:2]
            for size in sizes:
                total = total.plus(size)
            total = total.plus(sizes[-1], len(group) - len(sizes))
        return total

    def _make(self, capacity: int) -> Cache:
        """The empty cache; on the meta device the CPU reads rows of no store."""
        cache, options = self.choice.make(self.config, capacity), self.choice.options
        if options is None or options.store not in READ_BY_CPU:
            return cache
        assert isinstance(cache, RetrievalCache)
        options = cache.options.replace(store="host", disk=None)
        return type(cache)(config=self.config, options=options)

    def _groups(self, cache: Cache) -> Iterator[list[int]]:
        """Numbers of layers that are alike."""
        groups: dict[Any, list[int]] = {}
        for number, layer in enumerate(cache.layers):
            if isinstance(layer, (RetrievalLayer, *_WHOLE)):
                window = getattr(layer, "sliding_window", None)
                borrows = getattr(layer, "lender", None) is not None
                key = type(layer), window, layer_shape(self.config, number), borrows
                groups.setdefault(key, []).append(number)
        yield from groups.values()

    def _pass(self, cache: Cache, number: int, start: int, count: int) -> None:
        """Give a layer ``count`` tokens, which begin at the token index ``start``."""
        layer, shape = cache.layers[number], layer_shape(self.config, number)
        rank = shape.rank
        dims = (rank, shape.head_dim - rank) if rank else (shape.head_dim, shape.head_dim)
        keys, values = (self._rows(shape.kv_heads, count, dim) for dim in dims)
        keys, values = layer.update(keys, values)
        make = partial(self._rows, 1, count)
        update_indexer(self.config, number, layer, lambda dim: make(dim)[:, 0])
        if isinstance(layer, RetrievalLayer):
            query = self._rows(shape.heads, count, shape.head_dim)
            positions = torch.arange(start, start + count, device=_META)[None]
            attend(layer, query, keys, values, rank or shape.head_dim, positions)

    def _rows(self, heads: int, count: int, dim: int) -> torch.Tensor:
        return torch.empty(1, heads, count, dim, dtype=self.dtype, device=_META)

    def _layer_bytes(self, cache: Cache, number: int) -> CacheBytes:
        layer, options = cache.layers[number], self.choice.options
        if not isinstance(layer, RetrievalLayer):
            nbytes = memory_report([layer], []).other_layers
            # A static layer counts its tokens in a tensor, and attends to its whole buffer.
            read = None if isinstance(layer, StaticLayer) else layer_kv_bytes(layer)
            copies = options.snapshots if options is not None and is_stuck(layer) else 0
            return CacheBytes(
                window=nbytes,
                store_host=copies * nbytes,
                read_device=nbytes if read is None else read,
            )
        report, (near, far, rows) = memory_report([layer], [layer]), step_reads(layer)
        assert options is not None and layer.kv is not None, "a filled retrieval layer has both"
        store = layer.kv.store
        # All rows of a resident store may be near.
        if store is not None and store.over_bus and options.store != "resident":
            far += rows
        else:
            near += rows
        device, host = report.store_device, report.store_host
        bus, cpu = far, 0.0
        if options.store in READ_BY_CPU:
            # Page tables lie in host memory too, and nothing crosses the bus.
            device, host, bus, cpu = 0, host + device, 0.0, far
        return CacheBytes(
            *(report.window, report.index, device, host, report.shared), *(near, bus, cpu)
        )


def skipped_layers(cache: Cache) -> Sequence[int]:
    """Numbers of linear and recurrent layers, whose state does not grow and is left out."""
    types = (RetrievalLayer, *_WHOLE, DummyLayer)
    return [number for number, layer in enumerate(cache.layers) if not isinstance(layer, types)]
