"""The memory that is free, that a cache will take, and that was taken at most."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.bench.timing import synchronize
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.models.compatibility import is_latent, layer_shapes
from hf_kvret.options import config as options
from hf_kvret.stores.free_memory import free_host_bytes

# An index beside the store takes at most what a copy of the keys with spare room takes.
_INDEX_SHARE = 0.6


def byte_count(text: str) -> int:
    """``options.byte_count`` for argparse."""
    try:
        return options.byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class Need(NamedTuple):
    """Bytes that a cache is expected to take."""

    device: int
    host: int


def predict_need(
    config: PreTrainedConfig, choice: CacheChoice, batch: int, context: int, dtype: torch.dtype
) -> Need:
    """An upper bound of the bytes of the filled cache, and of filling its largest layer.

    Keys and values of all tokens in every layer (a sliding layer takes less), for a retrieval
    cache its index too, and what one layer makes of a prompt: its keys and values three times, and
    queries and outputs of its attention or the three matrices of its MLP.
    """
    # Layers hold keys and values, or latents alone.
    shapes, tensors = layer_shapes(config), 1 if is_latent(config) else 2
    layers = [tensors * batch * context * shape.width * dtype.itemsize for shape in shapes]
    rows, queries = sum(layers), max(shape.heads * shape.head_dim for shape in shapes)
    if is_latent(config):
        dim = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        queries = config.num_attention_heads * dim
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    passing = 3 * max(layers) + batch * context * max(2 * queries, 3 * inner) * dtype.itemsize
    if choice.options is not None:
        index, store = int(_INDEX_SHARE * rows), choice.options.store
        bits = row_bits(choice, config)
        if bits < 16:
            # Scales take a sixteenth of the bytes of codes.
            rows = rows * bits * 17 // (16 * 8 * dtype.itemsize)
        if store in ("host", "resident", "cpu", "higgs-host"):
            return Need(index + passing, rows)
        if store == "disk":
            return Need(index + passing, 0)
        if choice.options.splits_rows:
            # Without a budget the store takes half of the memory that is free: here, no row.
            budget = choice.options.device_budget
            near = 0 if budget is None else min(rows, options.byte_count(budget))
            return Need(near + index + passing, rows - near)
        return Need(rows + index + passing, 0)
    return Need(passing, rows) if choice.on_host else Need(rows + passing, 0)


def row_bits(choice: CacheChoice, config: PreTrainedConfig) -> int:
    """Bits of an element in the store of a cache for this model; 16: as the model has it."""
    if choice.options is None:
        return 16
    # A cache is made because its artifact may set them; an empty one takes no memory.
    cache = choice.make(config, 0)
    assert isinstance(cache, RetrievalCache)
    return cache.options.row_bits


def shortage(need: Need, device: torch.device) -> str | None:
    """Why ``need`` can't be met here, or None.

    Only host memory is predicted: a GPU says by itself when it is full, and a host that runs out
    has its processes killed.
    """
    host = need.host if device.type == "cuda" else need.host + need.device
    available = available_host_memory()
    if host <= available:
        return None
    return (
        f"out of memory (predicted: {host / 1e9:.1f} GB of host memory, {available / 1e9:.1f} GB "
        "available)"
    )


def available_host_memory() -> int:
    """``free_host_bytes``; where it is unknown, more than there ever is."""
    free = free_host_bytes()
    # Where nothing can be read, nothing is refused; an allocation that fails is still recorded.
    return 2**63 if free is None else free


def check_weights(held: int, device: torch.device, name: str) -> None:
    """ValueError when a model of ``held`` bytes does not fit into the memory that is free now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = available_host_memory()
    if held > free:
        raise ValueError(
            f"--shape {name}: its weights take {held / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            "free: give --layers, a smaller shape, or another --dtype"
        )


class PeakDeviceMemory:
    """The most memory of a CUDA device that tensors took at a time since it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self.restart()

    def restart(self) -> int | None:
        """Forget the peak so far; returns bytes allocated now, None on a CPU."""
        if self._device.type != "cuda":
            return None
        synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def growth(self) -> int | None:
        """Bytes of the peak above where it began; None on a CPU, where torch does not count."""
        if self._start is None:
            return None
        synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._start


class PeakHostMemory:
    """The most host memory of this process since it was made. Linux only.

    It counts pages that the process touched, whatever for: caches, buffers of the model, memory
    that an allocator keeps for later. Freed memory that is used again doesn't count twice.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._start = _status_bytes("VmRSS")
        except OSError:
            self._start = None

    def growth(self) -> int | None:
        """Bytes of the peak above where it began; None where the system doesn't say."""
        peak = _status_bytes("VmHWM")
        return None if self._start is None or peak is None else max(0, peak - self._start)


def _status_bytes(name: str) -> int | None:
    """Bytes of a line of the process' status; None where the system has none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None
    )
