"""Bytes that a cache holds and that a decode step reads of it, and rows that decoding read.

What a cache really holds and makes is counted whoever wrote it, and whatever it says of itself.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvret.cache import RetrievalCache
from hf_kvret.layer.indexed import indexer_nbytes
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.models.compatibility import layer_shapes

# Kineto tells of each start and end otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Nothing that belongs to one cache lies behind these.
_SHARED = (type, ModuleType, str, int, float, torch.device, torch.dtype)
# Classes and functions of these packages keep no rows themselves.
_PLAIN = ("builtins", "collections", "hf_kvret", "torch", "transformers")
_MAPS = Path("/proc/self/maps")
# Mappings with these paths are memory.
_MEMORY = ("/dev/", "/memfd:")


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
    def sizes(self) -> dict[str, int]:
        """The bytes, by name."""
        names = ("step_bytes", "device_bytes", "host_bytes", "full_bytes")
        return {name: getattr(self, name) for name in names}

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
    return Usage(device, host, full, int(rows), length, sum(held))


class Held(NamedTuple):
    """Bytes of memory that a cache keeps alive.

    Attributes:
        device: on the model's device.
        host: in host memory, where the model is on another device.
        mapped: of files that are mapped into memory; memory that processes share is none.
    """

    device: int
    host: int
    mapped: int


class _Block(NamedTuple):
    """Memory that is kept as a whole: its address, its bytes, whether it is a CPU's."""

    address: int
    nbytes: int
    on_cpu: bool


def held_bytes(cache: Any, model: nn.Module) -> Held:
    """What ``cache`` and everything that it reaches keep alive, but for ``model`` itself.

    Each storage counts once, and a view with its whole storage. Attributes, slots, containers,
    closures and attributes of classes are followed, whatever they are called.
    """
    files, on_cpu = _mapped_ranges(), next(model.parameters()).is_cpu
    held = [0, 0, 0]
    for block in held_blocks(cache, model).values():
        in_file = block.on_cpu and any(first <= block.address < last for first, last in files)
        held[2 if in_file else int(block.on_cpu and not on_cpu)] += block.nbytes
    return Held(*held)


def held_blocks(cache: Any, model: nn.Module) -> dict[int, _Block]:
    """The memory that ``held_bytes`` counts, by address."""
    weights = [*model.parameters(), *model.buffers()]
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    seen = {id(module): module for module in model.modules()} | {id(weights): weights}
    blocks: dict[int, _Block] = {}
    queue = [cache]
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        # It is kept, so that its id is no other's.
        seen[id(one)] = one
        block = _block(one)
        if block is None:
            queue += _parts(one)
        elif block.address not in known:
            blocks[block.address] = max(block, blocks.get(block.address, block))
    return blocks


def step_bytes(step: Callable[[], Any]) -> tuple[int, int]:
    """The bytes that ``step`` has at its peak above those before it, and all that it makes.

    They are those of torch's allocators; a tensor that is made and dropped counts. The step is
    taken twice, and the second one counts: torch tells only of memory that it saw being taken.
    """
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
    events: Any = seen.profiler
    events = [one for one in events.kineto_results.events() if one.name() == "[memory]"]
    sizes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
    return max(accumulate(sizes, initial=0)), sum(size for size in sizes if size > 0)


@contextmanager
def attention_keys(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """The keys that attention is handed in this context, a tensor for each call."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    attend, keys = ALL_ATTENTION_FUNCTIONS[name], list[torch.Tensor]()

    def seen(module: Any, query: Any, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys.append(key)
        return attend(module, query, key, *args, **kwargs)

    # The name may stand for a function of another library, which comes back.
    with patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, {name: seen}):
        yield keys


def _block(one: Any) -> _Block | None:
    """The memory of a tensor, an array or bytes; None for what has parts."""
    is_tensor = isinstance(one, torch.Tensor)
    # Some tensors consist of others, as quantized ones do.
    if is_tensor and (type(one) is torch.Tensor or not hasattr(one, "__tensor_flatten__")):
        storage = one.untyped_storage()
        return _Block(storage.data_ptr(), storage.nbytes(), one.is_cpu)
    if isinstance(one, np.ndarray):
        while isinstance(one.base, np.ndarray):
            one = one.base
        return _Block(one.__array_interface__["data"][0], one.nbytes, True)
    if isinstance(one, bytes | bytearray):
        return _Block(id(one), len(one), True)
    return None


def _parts(one: Any) -> Iterable[Any]:
    """The objects that ``one`` refers to."""
    if isinstance(one, torch.Tensor):
        wrapper: Any = one
        return [getattr(one, name) for name in wrapper.__tensor_flatten__()[0]]
    is_function = isinstance(one, FunctionType)
    parts = [one.__closure__, one.__defaults__] if is_function else gc.get_referents(one)
    owners: Iterable[Any] = [one] if is_function else type(one).__mro__
    own = (x for x in owners if (x.__module__ or "").partition(".")[0] not in _PLAIN)
    named = (value for x in own for value in (_globals_of(x) if is_function else vars(x).values()))
    # Tables of functions that remember are those of the whole process.
    return [*parts, *(x for x in named if isinstance(x, FunctionType) or not callable(x))]


def _globals_of(function: FunctionType) -> list[Any]:
    """What the code of a function names of its module."""
    codes = [function.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    names = {name for code in codes for name in code.co_names}
    return [value for name, value in function.__globals__.items() if name in names]


def _mapped_ranges() -> list[tuple[int, int]]:
    """Addresses of files that are mapped, where the system says them."""
    if not _MAPS.is_file():
        return []
    # The inode of a file on a disk is not 0. Shared and pinned memory have paths as well.
    lines = (line.split(maxsplit=5) for line in _MAPS.read_text().splitlines())
    files = (x for x in lines if len(x) > 5 and x[4] != "0" and not x[5].startswith(_MEMORY))
    ranges = [x[0].split("-") for x in files if not x[5].endswith("(deleted)")]
    return [(int(first, 16), int(last, 16)) for first, last in ranges]
