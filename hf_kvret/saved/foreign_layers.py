"""Cache layers of transformers in a saved cache: only known attributes, of known types.

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
_TENSOR, _PLAIN, _DTYPE = "tensor", "plain value", "dtype"
_STATES, _BY_STATE = "tensor by state", "plain value by state"
# A new layer has the first from the model, so that they are compared, and makes the second itself.
_MODEL, _MADE = "of the model", "made anew"

_ATTRIBUTES = {
    "keys": _TENSOR,
    "values": _TENSOR,
    "indexer_keys": _TENSOR,
    "indexer_position_ids": _TENSOR,
    "is_initialized": _PLAIN,
    "is_indexer_initialized": _PLAIN,
    "cumulative_length": _PLAIN,
    "record_past": _PLAIN,
    "dtype": _DTYPE,
    "indexer_dtype": _DTYPE,
    "conv_states": _STATES,
    "recurrent_states": _STATES,
    "is_conv_states_initialized": _BY_STATE,
    "is_recurrent_states_initialized": _BY_STATE,
    "has_previous_state": _BY_STATE,
    "conv_kernel_size": _BY_STATE,
    "sliding_window": _MODEL,
    "number_of_states": _MODEL,
    "device": _MADE,
    "indexer_device": _MADE,
    "_sliding_window_tensor": _MADE,
}
_LAYERS = {
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
}


def layer_state(layer: Any) -> tuple[Tensors, dict[str, Any]]:
    """Tensors of a layer on the CPU, and its plain values, by name.

    Raises:
        TypeError: a layer, or an attribute of it, that is not known.
    """
    if type(layer) not in _LAYERS:
        raise TypeError(
            f"cannot save a {type(layer).__name__}, which this hf_kvret does not know: "
            "upgrade hf_kvret"
        )
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for name, value in vars(layer).items():
        type_ = _ATTRIBUTES.get(name)
        if type_ is None:
            raise TypeError(
                f"cannot save the attribute {name} of a {type(layer).__name__}, which this "
                "hf_kvret does not know: upgrade hf_kvret, or use an earlier transformers"
            )
        if type_ == _TENSOR and value is not None:
            tensors[name] = _on_cpu(value)
        elif type_ == _STATES:
            tensors |= {f"{name}.{i}": _on_cpu(x) for i, x in value.items() if x is not None}
        elif type_ == _BY_STATE:
            values[name] = list(value.values())
        elif type_ == _DTYPE:
            values[name] = None if value is None else str(value).removeprefix("torch.")
        elif type_ in (_PLAIN, _MODEL):
            values[name] = value
    return tensors, values


def restore(
    layer: Any, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Give a new ``layer`` what ``layer_state`` took from one.

    Args:
        layer: changed in place.
        values: by name.
        tensors: by name; others are left alone.
        device: of the tensors of the layer.

    Raises:
        ValueError: a layer of another model.
    """
    states = range(int(getattr(layer, "number_of_states", 0)))
    moved = {
        name: tensor.to(device)
        for name, tensor in tensors.items()
        if name.partition(".")[0] in _ATTRIBUTES
    }
    for name, type_ in _ATTRIBUTES.items():
        if type_ == _TENSOR and (name in vars(layer) or name in moved):
            setattr(layer, name, moved.get(name))
        elif type_ == _STATES and states:
            setattr(layer, name, {i: moved.get(f"{name}.{i}") for i in states})
        elif name not in values:
            continue
        elif type_ == _BY_STATE:
            setattr(layer, name, dict(enumerate(values[name])))
        elif type_ == _MODEL and values[name] != getattr(layer, name):
            raise ValueError(
                f"{name} is {values[name]}, and this model's is {getattr(layer, name)}: the cache "
                "is of another model"
            )
        elif type_ == _DTYPE:
            setattr(layer, name, None if values[name] is None else _DTYPES[values[name]])
        elif type_ == _PLAIN:
            setattr(layer, name, values[name])
    keys = moved.get("keys")
    if LAYERS_KNOW_DTYPE and keys is not None and "dtype" not in values:
        layer.dtype = keys.dtype
    for prefix in ("", "indexer_"):
        is_used = getattr(layer, f"{prefix}keys", None) is not None
        if is_used or getattr(layer, f"{prefix}dtype", None) is not None:
            setattr(layer, f"{prefix}device", device)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer._sliding_window_tensor = layer._sliding_window_tensor.to(device)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()
