"""Whether the layers of a loaded cache agree with one another, and with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_kvret.contracts.schema import check_finite
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.saved import foreign_layers
from hf_kvret.saved.origin import FilledCache


def check_agreement(directory: Path, cache: FilledCache, value_dim: int | None = None) -> None:
    """ValueError where the layers of a loaded cache do not hold the same rows and tokens.

    Args:
        directory: that it was loaded from, for the message.
        cache: restored but for its origin.
        value_dim: numbers of a value, where the configuration says so; else as many as of a key.
    """
    fault = cache.stack.fault() or _form_fault(cache) or _value_fault(cache, value_dim)
    if fault is not None:
        raise ValueError(f"{directory} is damaged or crafted: {fault}; save the cache again")
    regions = [layer.regions for layer in cache.retrieval_layers]
    indexes = [each.index for each in regions if each is not None]
    if any(index is not None and index.needs_finite for index in indexes):
        # What one layer makes of them reaches the next one.
        for number, layer in enumerate(cache.layers):
            if not isinstance(layer, RetrievalLayer):
                _check_finite(f"{directory}: layer {number}: ", layer)


def _check_finite(place: str, layer: Any) -> None:
    for name, tensor in foreign_layers.parts_of(layer)[0].items():
        if tensor.is_floating_point():
            check_finite(f"{place}{name}", tensor)


def _value_fault(cache: FilledCache, value_dim: int | None) -> str | None:
    for layer in cache.retrieval_layers:
        regions, shape = layer.regions, layer.of_model.shape
        if regions is None or shape is None or regions.window.value_in_key:
            continue
        dim = regions.window.values.shape[3]
        if dim not in (shape.head_dim, value_dim):
            return f"there are values of {dim} numbers, and this model's have {shape.head_dim}"
    return None


def _form_fault(cache: FilledCache) -> str | None:
    """What tells that layers are not of one model; None where nothing does."""
    regions = [layer.regions for layer in cache.retrieval_layers]
    foreign = [layer for layer in cache.layers if not isinstance(layer, RetrievalLayer)]
    batches = {each.batch_size for each in regions if each is not None}
    batches |= {batch for layer in foreign if (batch := foreign_layers.batch_of(layer))}
    if len(batches) > 1:
        return f"the layers hold batches of {', '.join(map(str, sorted(batches)))}"
    dtypes = {each.window.keys.dtype for each in regions if each is not None}
    if len(dtypes) > 1:
        return f"the layers hold tokens in {', '.join(sorted(map(str, dtypes)))}"
    forms: dict[Any, Any] = {}
    for layer, each in zip(cache.retrieval_layers, regions, strict=True):
        if each is not None:
            form = each.window.keys.shape[1::2], each.window.values.shape[3]
            if forms.setdefault(layer.of_model.shape, form) != form:
                return "layers that the model has alike hold tokens of different forms"
    for layer in foreign:
        for name, form in foreign_layers.forms_of(layer).items():
            if forms.setdefault((type(layer), name), form) != form:
                return f"{name} of layers of one kind have different forms"
    return None
