"""Adapters of PEFT inside a model: which of them are active, and a hash of their weights."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_kvret.integration.sampled_tensors import plain_parts, sampled_bytes

# Under these names PEFT keeps the module that it wraps.
_WRAPPED = ("base_layer", "original_module")


@dataclass(frozen=True)
class AdapterHash:
    """An active adapter.

    Attributes:
        name: as it is called in the model; the same weights may have another name elsewhere.
        sha256: hex digest of its weights in all layers, with their scaling; empty where some can't
            be read, as they are offloaded or in shards.
        merged: it was added to the weights of the model, in a layer at least.
    """

    name: str
    sha256: str
    merged: bool = False

    @property
    def content(self) -> tuple[str, bool]:
        """What must agree."""
        return self.sha256, self.merged

    def __str__(self) -> str:
        return f"{self.name} (merged)" if self.merged else self.name


# Hashes of a decoder's adapters, with stamps and numbers of the weights that they were made of.
_hashes: weakref.WeakKeyDictionary[nn.Module, tuple[Any, bytes, tuple[AdapterHash, ...]]] = (
    weakref.WeakKeyDictionary()
)
# Of so many of them numbers are read.
_SAMPLED = 32


def active_adapters(decoder: nn.Module, read: bool = True) -> tuple[AdapterHash, ...]:
    """Adapters that the layers of ``decoder`` compute with, in the order in which these name them.

    Weights are hashed when they have changed since the last call. Empty where PEFT was never
    imported.

    Args:
        decoder: the text model.
        read: read a sample of the weights, so that writing through ``data`` is seen.
    """
    layers = adapter_layers(decoder)
    if not layers:
        return ()
    parts = [
        (path, layer, adapter)
        for path, layer in layers.items()
        for adapter in _active_in(layer)
        if any(_weights(layer, adapter))
    ]
    tensors = [
        (path, adapter, _scaling(layer, adapter), adapter in _merged(layer), name, tensor)
        for path, layer, adapter in parts
        for name, tensor in _weights(layer, adapter)
    ]
    stamps = tuple((*facts, stamp(tensor)) for *facts, tensor in tensors)
    numbers = sampled_bytes(_some(tensor for *_, tensor in tensors)) if read else b""
    known = _hashes.get(decoder)
    if known is None or known[0] != stamps or (read and known[1] != numbers):
        known = _hashes[decoder] = stamps, numbers, _hashed(parts)
    return known[2]


def _hashed(parts: list[tuple[str, nn.Module, str]]) -> tuple[AdapterHash, ...]:
    digests = {adapter: hashlib.sha256() for _, _, adapter in parts}
    merged = {adapter for _, layer, adapter in parts if adapter in _merged(layer)}
    unread: set[str] = set()
    for path, layer, adapter in parts:
        digest = digests[adapter]
        digest.update(f"{_plain_name(path)} {_scaling(layer, adapter)}".encode())
        for name, tensor in _weights(layer, adapter):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            if plain_parts(tensor):
                digest.update(tensor_bytes(tensor))
            else:
                unread.add(adapter)
    return tuple(
        AdapterHash(name, "" if name in unread else digest.hexdigest(), name in merged)
        for name, digest in digests.items()
    )


def adapter_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Modules in ``module`` that PEFT put around others, by path."""
    if "peft" not in sys.modules:
        return {}
    return {
        path: layer
        for path, layer in module.named_modules()
        if hasattr(layer, "adapter_layer_names") and hasattr(layer, "active_adapters")
    }


def base_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of ``module`` without those of adapters, by the names they have without these."""
    return _of_base(module, dict(module.named_parameters()))


def base_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Saved buffers of ``module``, as ``base_parameters``."""
    transient = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    saved = {name: one for name, one in module.named_buffers() if name not in transient}
    return _of_base(module, saved)


def _of_base(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    own = tuple(
        f"{path}.{attribute}." if path else f"{attribute}."
        for path, layer in adapter_layers(module).items()
        for attribute in _attributes(layer)
    )
    return {
        _plain_name(name): tensor for name, tensor in tensors.items() if not name.startswith(own)
    }


def stamp(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What changes when ``tensor`` is replaced, moved, cast, or written to in place.

    Writing through ``tensor.data`` does not change it.
    """
    version = -1 if tensor.is_inference() else tensor._version
    place = tensor.data_ptr() if type(tensor) in (torch.Tensor, nn.Parameter) else 0
    return id(tensor), version, tensor.dtype, str(tensor.device), place


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The numbers of ``tensor`` as bytes; reads them from its device."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def _some(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Up to 32 of the plain tensors in ``tensors``, evenly spread."""
    plain = [one for tensor in tensors for one in plain_parts(tensor).values() if one.numel()]
    return [plain[number * len(plain) // _SAMPLED] for number in range(_SAMPLED)] if plain else []


def _active_in(layer: Any) -> list[str]:
    """Adapters that a layer computes with: where some are merged, it does with these alone."""
    if getattr(layer, "disable_adapters", False):
        return []
    # Of a call that names an adapter for each row of the batch.
    for hook in layer._forward_pre_hooks.values():
        if by_row := getattr(hook, "keywords", {}).get("adapter_names"):
            return sorted(set(by_row))
    merged = _merged(layer)
    active = layer.active_adapters
    return merged or ([active] if isinstance(active, str) else list(active))


def _merged(layer: Any) -> list[str]:
    return list(getattr(layer, "merged_adapters", ()))


def _attributes(layer: Any) -> tuple[str, ...]:
    return tuple(layer.adapter_layer_names)


def _weights(layer: Any, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of ``adapter`` in ``layer``, by name."""
    for attribute in _attributes(layer):
        holder = getattr(layer, attribute, None)
        if holder is None or adapter not in holder:
            continue
        part = holder[adapter]
        if isinstance(part, torch.Tensor):
            yield attribute, part
        elif isinstance(part, nn.Module):
            named = [*part.named_parameters(), *part.named_buffers()]
            yield from ((f"{attribute}.{name}", tensor) for name, tensor in named)


def _scaling(layer: Any, adapter: str) -> Any:
    scaling = getattr(layer, "scaling", None)
    return scaling.get(adapter) if isinstance(scaling, Mapping) else None


def _plain_name(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPED)
