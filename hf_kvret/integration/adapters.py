"""Adapters of PEFT inside a model: which of them are active, and a hash of their weights."""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Under these names PEFT keeps the module that it wraps.
_WRAPPED = ("base_layer", "original_module")


@dataclass(frozen=True)
class AdapterHash:
    """An active adapter.

    Attributes:
        name: as it is called in the model; the same weights may have another name elsewhere.
        sha256: hex digest of its weights in all layers, with their scaling.
    """

    name: str
    sha256: str


# Hashes of a decoder's adapters, with the stamps of the weights that they were made of.
_hashes: weakref.WeakKeyDictionary[nn.Module, tuple[Any, tuple[AdapterHash, ...]]] = (
    weakref.WeakKeyDictionary()
)


def active_adapters(decoder: nn.Module) -> tuple[AdapterHash, ...]:
    """Active adapters in the layers of ``decoder``, in the order in which these name them.

    Weights are read and hashed when they have changed since the last call. Empty where PEFT was
    never imported.
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
    stamps = tuple(
        (path, adapter, _scaling(layer, adapter), name, stamp(tensor))
        for path, layer, adapter in parts
        for name, tensor in _weights(layer, adapter)
    )
    known = _hashes.get(decoder)
    if known is None or known[0] != stamps:
        digests = {adapter: hashlib.sha256() for _, _, adapter in parts}
        for path, layer, adapter in parts:
            digest = digests[adapter]
            digest.update(f"{_plain_name(path)} {_scaling(layer, adapter)}".encode())
            for name, tensor in _weights(layer, adapter):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor_bytes(tensor))
        found = tuple(AdapterHash(name, digest.hexdigest()) for name, digest in digests.items())
        known = _hashes[decoder] = stamps, found
    return known[1]


def adapter_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Modules in ``module`` that PEFT put around others, by path."""
    if "peft" not in sys.modules:
        return {}
    return {
        path: layer
        for path, layer in module.named_modules()
        if hasattr(layer, "adapter_layer_names") and hasattr(layer, "active_adapters")
    }


def base_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of ``module`` without those of adapters, by the names they have without these."""
    parameters = dict(module.named_parameters())
    layers = adapter_layers(module)
    if not layers:
        return parameters
    own = tuple(
        f"{path}.{attribute}." if path else f"{attribute}."
        for path, layer in layers.items()
        for attribute in _attributes(layer)
    )
    return {
        _plain_name(name): parameter
        for name, parameter in parameters.items()
        if not name.startswith(own)
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


def _active_in(layer: Any) -> list[str]:
    if getattr(layer, "disable_adapters", False):
        return []
    active = layer.active_adapters
    return [active] if isinstance(active, str) else list(active)


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
