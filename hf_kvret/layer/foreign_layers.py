"""Cache layers of transformers in a saved cache: only known attributes.

A file never says which attribute is set: what is here does. A layer with an attribute that is not
listed can't be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from hf_kvret.contracts.state import Tensors
from hf_kvret.models.versions import LAYERS_KNOW_DTYPE, DummyLayer

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
# Tensors by the number of a state.
_STATES = {"conv_states", "recurrent_states"}
# A new layer has these from the model, so that they are compared.
_OF_MODEL = {"sliding_window", "number_of_states"}
# A new layer makes these by itself.
_MADE = {"device", "indexer_device", "_sliding_window_tensor"}
_SAVED = {
    *("keys", "values", "indexer_keys", "indexer_position_ids"),
    *("is_initialized", "is_indexer_initialized", "cumulative_length", "record_past"),
    *("dtype", "indexer_dtype", "is_conv_states_initialized", "is_recurrent_states_initialized"),
    *("has_previous_state", "conv_kernel_size"),
    *(_STATES | _OF_MODEL),
}
_LAYERS = {
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
}


def is_known(layer: Any) -> bool:
    """Whether this version knows all that a layer of transformers holds."""
    return type(layer) in _LAYERS and not vars(layer).keys() - _SAVED - _MADE


def layer_state(layer: Any) -> tuple[Tensors, dict[str, Any]]:
    """Tensors of a layer, which they are part of, and its plain values, by name.

    Raises:
        TypeError: a layer, or an attribute of it, that is not known.
    """
    unknown = vars(layer).keys() - _SAVED - _MADE
    if not is_known(layer):
        what = f"the attribute {min(unknown)} of a" if unknown else "a cache layer of type"
        raise TypeError(
            f"cannot save {what} {type(layer).__name__}, which this hf_kvret does not know: "
            "upgrade hf_kvret, or use an earlier transformers"
        )
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if name in _STATES:
            tensors |= {f"{name}.{i}": x.detach() for i, x in value.items() if x is not None}
        elif isinstance(value, torch.Tensor) and name not in _MADE:
            tensors[name] = value.detach()
        elif isinstance(value, torch.dtype):
            values[name] = str(value).removeprefix("torch.")
        elif name not in _MADE:
            values[name] = list(value.values()) if isinstance(value, dict) else value
    return tensors, values


def restore(
    layer: Any, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Give ``layer`` copies of what ``layer_state`` took from one, or from itself.

    Args:
        layer: changed in place. A captured step knows where its states are, so they stay there.
        values: by name.
        tensors: by name; others are left alone.
        device: of the tensors of the layer.

    Raises:
        ValueError: a layer of another model.
    """
    for name in _OF_MODEL & values.keys():
        if values[name] != getattr(layer, name):
            raise ValueError(
                f"{name} is {values[name]}, and this model's is {getattr(layer, name)}: the cache "
                "is of another model"
            )
    for name in _SAVED & values.keys():
        value = values[name]
        if name.endswith("dtype"):
            value = _DTYPES.get(value)
        # A list has a value for each state.
        setattr(layer, name, dict(enumerate(value)) if isinstance(value, list) else value)
    for name in _SAVED & tensors.keys():
        setattr(layer, name, tensors[name].to(device, copy=True))
    for name in _STATES & vars(layer).keys():
        states = getattr(layer, name)
        for i in range(layer.number_of_states):
            states[i] = _copied(tensors.get(f"{name}.{i}"), device, states[i])
    if LAYERS_KNOW_DTYPE and "keys" in tensors and "dtype" not in values:
        layer.dtype = tensors["keys"].dtype
    for prefix in ("", "indexer_"):
        is_used = getattr(layer, f"{prefix}keys", None) is not None
        if is_used or getattr(layer, f"{prefix}dtype", None) is not None:
            setattr(layer, f"{prefix}device", device)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer._sliding_window_tensor = layer._sliding_window_tensor.to(device)


def _copied(
    tensor: torch.Tensor | None, device: torch.device, place: torch.Tensor | None
) -> torch.Tensor | None:
    """A copy of ``tensor`` on ``device``, in ``place`` where it fits."""
    if tensor is None:
        return None
    if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
        return tensor.to(device, copy=True)
    # A state that was made in inference mode can be written to in that mode alone.
    with torch.inference_mode():
        return place.copy_(tensor)
