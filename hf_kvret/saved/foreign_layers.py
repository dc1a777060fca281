"""Cache layers of transformers in a saved cache: only known attributes, of known types.

A file never says which attribute is set: what is here does, by class. A layer with an attribute
that is not listed can't be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from hf_kvret.contracts.state import Tensors
from hf_kvret.models.versions import LAYERS_KNOW_DTYPE, DummyLayer

_FLOATS = ("bfloat16", "float16", "float32", "float64")
_TENSOR, _FLAG, _COUNT, _DTYPE = "tensor", "flag", "count", "dtype"
_STATES, _FLAGS, _COUNTS = "tensor by state", "flag by state", "count by state"
# A new layer has the first from the model, so that they are compared, and makes the second itself.
_MODEL, _MADE = "of the model", "made anew"

_DYNAMIC = {
    "keys": _TENSOR,
    "values": _TENSOR,
    "is_initialized": _FLAG,
    "dtype": _DTYPE,
    "device": _MADE,
}
_SLIDING = _DYNAMIC | {
    "sliding_window": _MODEL,
    "cumulative_length": _COUNT,
    "_sliding_window_tensor": _MADE,
    "record_past": _FLAG,
}
_INDEXED = _DYNAMIC | {
    "indexer_keys": _TENSOR,
    "indexer_position_ids": _TENSOR,
    "is_indexer_initialized": _FLAG,
    "indexer_dtype": _DTYPE,
    "indexer_device": _MADE,
}
_LINEAR = {
    "number_of_states": _MODEL,
    "conv_states": _STATES,
    "recurrent_states": _STATES,
    "is_conv_states_initialized": _FLAGS,
    "is_recurrent_states_initialized": _FLAGS,
    "has_previous_state": _FLAGS,
    "conv_kernel_size": _COUNTS,
    "device": _MADE,
    "dtype": _DTYPE,
    "record_past": _FLAG,
}


_ATTRIBUTES: dict[type, dict[str, str]] = {
    DynamicSlidingWindowLayer: _SLIDING,
    DynamicIndexedLayer: _INDEXED,
    LinearAttentionLayer: _LINEAR,
    LinearAttentionAndFullAttentionLayer: _DYNAMIC | _LINEAR,
    LinearAttentionAndSlidingWindowAttentionLayer: _SLIDING | _LINEAR,
    DummyLayer: {"keys": _TENSOR, "values": _TENSOR, "is_initialized": _FLAG},
}
# Attributes that a layer has once tokens came.
_LATE = {"dtype", "indexer_dtype"}


def layer_state(layer: Any) -> tuple[Tensors, dict[str, Any]]:
    """Tensors of a layer on the CPU, and its plain values, by name.

    Raises:
        TypeError: a layer, or an attribute of it, that is not known.
    """
    attributes = _attributes(layer)
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for name, value in vars(layer).items():
        type_ = attributes.get(name)
        if type_ is None:
            raise TypeError(
                f"cannot save the attribute {name} of a {type(layer).__name__}, which this "
                "hf_kvret does not know: upgrade hf_kvret, or use an earlier transformers"
            )
        if type_ == _TENSOR and value is not None:
            tensors[name] = _on_cpu(value)
        elif type_ == _STATES:
            tensors |= {f"{name}.{i}": _on_cpu(x) for i, x in value.items() if x is not None}
        elif type_ in (_FLAGS, _COUNTS):
            values[name] = list(value.values())
        elif type_ == _DTYPE:
            values[name] = None if value is None else str(value).removeprefix("torch.")
        elif type_ in (_FLAG, _COUNT, _MODEL):
            values[name] = value
    return tensors, values


def restore(
    layer: Any, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Give a new ``layer`` what ``layer_state`` took from one.

    Raises:
        ValueError: a value is missing, unknown, or does not fit the others.
    """
    attributes = _attributes(layer)
    states = range(int(getattr(layer, "number_of_states", 0)))
    names = {name for name, type_ in attributes.items() if type_ in (_TENSOR, _MADE)}
    names |= {
        f"{name}.{i}" for name, type_ in attributes.items() if type_ == _STATES for i in states
    }
    unknown = [*sorted(set(tensors) - names), *sorted(set(values) - set(attributes))]
    if unknown:
        raise ValueError(f"a {type(layer).__name__} of this model has no {unknown[0][:80]}")
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    for name, type_ in attributes.items():
        if type_ == _TENSOR and (name in vars(layer) or name in moved):
            setattr(layer, name, moved.get(name))
        elif type_ == _STATES:
            setattr(layer, name, {i: moved.get(f"{name}.{i}") for i in states})
        elif type_ not in (_TENSOR, _MADE) and (name in values or name not in _LATE):
            _set_plain(layer, name, type_, values, len(states))
    keys = moved.get("keys")
    if LAYERS_KNOW_DTYPE and keys is not None and "dtype" not in values:
        layer.dtype = keys.dtype
    for prefix in ("", "indexer_"):
        is_used = getattr(layer, f"{prefix}keys", None) is not None
        if is_used or getattr(layer, f"{prefix}dtype", None) is not None:
            setattr(layer, f"{prefix}device", device)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer._sliding_window_tensor = layer._sliding_window_tensor.to(device)
    _check(layer)


def pop_tensors(layer: Any, state: Tensors) -> Tensors:
    """Take the tensors that belong to ``layer`` by their names out of ``state``."""
    names = [name for name in state if name.partition(".")[0] in _attributes(layer)]
    return {name: state.pop(name) for name in names}


def _set_plain(layer: Any, name: str, type_: str, values: Mapping[str, Any], states: int) -> None:
    """Set an attribute that is no tensor; ValueError for a value that no layer has."""
    if name not in values:
        raise ValueError(f"a {type(layer).__name__} needs {name}")
    value = values[name]
    by_state = value if isinstance(value, list) and len(value) == states else [object()]
    is_right = {
        _MODEL: type(value) is int and value == getattr(layer, name, None),
        _FLAG: isinstance(value, bool),
        _COUNT: _is_count(value),
        _DTYPE: value is None or (isinstance(value, str) and value in _FLOATS),
        _FLAGS: all(isinstance(one, bool) for one in by_state),
        _COUNTS: all(one is None or _is_count(one) for one in by_state),
    }
    if not is_right[type_]:
        raise ValueError(f"{name} is {str(value)[:40]}, which no layer of this model has")
    if type_ in (_FLAGS, _COUNTS):
        value = dict(enumerate(value))
    elif type_ == _DTYPE and value is not None:
        value = getattr(torch, value)
    setattr(layer, name, value)


def _check(layer: Any) -> None:
    """ValueError where values of a layer do not fit one another."""
    batch_size(layer)
    if isinstance(layer, DynamicLayer):
        _check_rows(layer)
    if isinstance(layer, DynamicIndexedLayer):
        _check_indexer(layer)
    if isinstance(layer, LinearAttentionLayer):
        _check_states(layer)
    if isinstance(layer, DummyLayer) and not (layer.keys is None and layer.values is None):
        raise ValueError("a DummyLayer holds nothing")


def _check_rows(layer: Any) -> None:
    keys, values = layer.keys, layer.values
    if not layer.is_initialized:
        if keys is not None or values is not None or getattr(layer, "cumulative_length", 0) != 0:
            raise ValueError("a layer that was never used has tokens")
        return
    fits = keys is not None and values is not None and keys.ndim == values.ndim == 4
    if not fits or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"keys {_described(keys)} and values {_described(values)} do not belong together"
        )
    if not keys.dtype == values.dtype == getattr(layer, "dtype", keys.dtype):
        raise ValueError(f"keys are {keys.dtype}, values {values.dtype}, not of the layer's dtype")
    if isinstance(layer, DynamicSlidingWindowLayer):
        count, end, window = keys.shape[2], layer.cumulative_length, layer.sliding_window
        if count > end or (window > 1 and count < min(end, window - 1)):
            raise ValueError(f"{count} tokens are not what a window of {window} keeps of {end}")


def _check_indexer(layer: Any) -> None:
    keys, positions = layer.indexer_keys, getattr(layer, "indexer_position_ids", None)
    if not layer.is_indexer_initialized:
        if keys is not None or positions is not None:
            raise ValueError("an indexer that was never used has tokens")
        return
    if not layer.is_initialized:
        raise ValueError("an indexer has tokens, its layer none")
    length = layer.keys.shape[2]
    if keys is None or keys.ndim != 3 or keys.shape[1] != length:
        raise ValueError(f"indexer_keys {_described(keys)} are not of {length} tokens")
    if keys.dtype != getattr(layer, "indexer_dtype", None) or len(keys) != len(layer.keys):
        raise ValueError(
            f"indexer_keys {_described(keys)} do not fit the keys {_described(layer.keys)}"
        )
    if positions is not None and (
        positions.ndim != 3 or positions.is_floating_point() or positions.shape[2] != length
    ):
        raise ValueError(f"indexer_position_ids {_described(positions)} are not of {length} tokens")


def _check_states(layer: Any) -> None:
    for i in range(layer.number_of_states):
        conv, size = layer.conv_states[i], layer.conv_kernel_size[i]
        recurrent = layer.recurrent_states[i]
        if layer.is_conv_states_initialized[i] != (conv is not None):
            raise ValueError("conv_states are not as is_conv_states_initialized says")
        if layer.is_recurrent_states_initialized[i] != (recurrent is not None):
            raise ValueError("recurrent_states are not as is_recurrent_states_initialized says")
        for state in (conv, recurrent):
            if state is not None and (state.ndim < 2 or not state.is_floating_point()):
                raise ValueError(f"a state {_described(state)} is not of a layer")
        if conv is None:
            continue
        if not size or conv.shape[-1] < size or (conv.shape[-1] > size and not layer.record_past):
            raise ValueError(f"conv_states {_described(conv)} are not of conv_kernel_size {size}")
        if layer.dtype is not None and conv.dtype != layer.dtype:
            raise ValueError(f"conv_states are {conv.dtype}, not {layer.dtype}")


def batch_size(layer: Any) -> int | None:
    """Sequences that a layer holds; None where it holds nothing."""
    tensors = [getattr(layer, "keys", None)]
    for name in ("conv_states", "recurrent_states"):
        tensors += getattr(layer, name, {}).values()
    sizes = {len(x) for x in tensors if x is not None and x.ndim}
    if len(sizes) > 1:
        raise ValueError(f"it holds batches of {sorted(sizes)}")
    return sizes.pop() if sizes else None


def fixed_sizes(layer: Any) -> dict[str, tuple[Any, ...]]:
    """Dtype and sizes of a layer's tensors that do not grow with the tokens, by name."""
    sizes: dict[str, tuple[Any, ...]] = {}
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if tensor is not None and tensor.ndim == 4:
            sizes[name] = (tensor.dtype, tensor.shape[1], tensor.shape[3])
    keys = getattr(layer, "indexer_keys", None)
    if keys is not None:
        sizes["indexer_keys"] = (keys.dtype, keys.shape[2])
    for name in ("conv_states", "recurrent_states"):
        for i, state in getattr(layer, name, {}).items():
            if state is not None:
                last = None if name == "conv_states" else state.shape[-1]
                sizes[f"{name}.{i}"] = (state.dtype, *state.shape[1:-1], last)
    return sizes


def _attributes(layer: Any) -> dict[str, str]:
    attributes = _ATTRIBUTES.get(type(layer))
    if attributes is None:
        raise TypeError(
            f"cannot save or load a {type(layer).__name__}, which this hf_kvret does not know: "
            "upgrade hf_kvret"
        )
    return attributes


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def _described(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48
