"""Bytes that a cache really holds and makes, whoever wrote it and whatever it says of itself."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Kineto tells of each start and end otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Nothing that belongs to one cache lies behind these.
_SHARED = (type, ModuleType, str, int, float, torch.device, torch.dtype)
# Classes of these packages keep no rows themselves.
_PLAIN = ("builtins", "collections", "torch", "transformers")
_MAPS = Path("/proc/self/maps")
# Mappings with these paths are memory.
_MEMORY = ("/dev/", "/memfd:")


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
            blocks[block.address] = block
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

    ALL_ATTENTION_FUNCTIONS[name] = seen
    try:
        yield keys
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def _block(one: Any) -> _Block | None:
    """The memory of a tensor, an array or bytes; None for what has parts."""
    if isinstance(one, torch.Tensor) and not _is_wrapper(one):
        storage = one.untyped_storage()
        return _Block(storage.data_ptr(), storage.nbytes(), one.is_cpu)
    if isinstance(one, np.ndarray):
        while isinstance(one.base, np.ndarray):
            one = one.base
        return _Block(one.__array_interface__["data"][0], one.nbytes, True)
    if isinstance(one, bytes | bytearray):
        return _Block(id(one), len(one), True)
    return None


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of others, as quantized ones do."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__")


def _parts(one: Any) -> Iterable[Any]:
    """The objects that ``one`` refers to."""
    if isinstance(one, torch.Tensor):
        wrapper: Any = one
        return [getattr(one, name) for name in wrapper.__tensor_flatten__()[0]]
    if isinstance(one, FunctionType):
        # Its globals are those of a module.
        return [*(one.__closure__ or ()), *(one.__defaults__ or ())]
    classes = (cls for cls in type(one).__mro__ if cls.__module__.partition(".")[0] not in _PLAIN)
    own = [value for cls in classes for value in vars(cls).values()]
    return [*gc.get_referents(one), *(value for value in own if not callable(value))]


def _mapped_ranges() -> list[tuple[int, int]]:
    """Addresses of files that are mapped, where the system says them."""
    if not _MAPS.is_file():
        return []
    lines = (line.split(maxsplit=5) for line in _MAPS.read_text().splitlines())
    ranges = [fields[0].split("-") for fields in lines if len(fields) > 5 and _is_file(*fields[4:])]
    return [(int(first, 16), int(last, 16)) for first, last in ranges]


def _is_file(inode: str, path: str) -> bool:
    """Whether a mapping is of a file on a disk; shared and pinned memory have paths as well."""
    return inode != "0" and not path.startswith(_MEMORY) and not path.endswith("(deleted)")
