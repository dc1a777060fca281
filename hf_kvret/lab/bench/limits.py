"""The memory that is free, and that a cache will take about."""

from __future__ import annotations

import argparse

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.models.compatibility import is_latent, layer_shapes
from hf_kvret.options import config as options
from hf_kvret.stores.free_memory import free_host_bytes


def byte_count(text: str) -> int:
    """``options.byte_count`` for argparse."""
    try:
        return options.byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def row_bits(choice: CacheChoice, config: PreTrainedConfig) -> int:
    """Bits of an element in the store of a cache for this model; 16: as the model has it."""
    if choice.options is None:
        return 16
    # A cache is made because its artifact may set them; an empty one takes no memory.
    cache = choice.make(config, 0)
    assert isinstance(cache, RetrievalCache)
    return cache.options.row_bits


def shortage(model: PreTrainedModel, choice: CacheChoice, batch: int, context: int) -> str | None:
    """Why a cell can't be measured on a CPU with so little memory, or None: a guess.

    A host that runs out of memory has its processes killed, while a GPU says so by itself. The
    guess is twice the bytes of all keys and values: the cache, its index, and a prompt on its way.
    """
    if model.device.type != "cpu":
        return None
    config = model.config
    # Layers hold keys and values, or latents alone.
    tensors = 1 if is_latent(config) else 2
    width = tensors * sum(shape.width for shape in layer_shapes(config)) * model.dtype.itemsize
    need = 2 * batch * context * width * row_bits(choice, config) // 16
    available = available_host_memory()
    if need <= available:
        return None
    return (
        f"out of memory (predicted: {need / 1e9:.1f} GB of host memory, {available / 1e9:.1f} GB "
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
