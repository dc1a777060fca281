"""Cache layers of transformers in a saved cache: only known attributes, of known kinds.

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

_FLOATS = {"float64", "float32", "float16", "bfloat16"}
_TENSOR, _FLAG, _COUNT, _DTYPE = "tensor", "flag", "count", "dtype"
_STATES, _FLAGS, _COUNTS = "tensor by state", "flag by state", "count by state"
# Of the model, and so in a new layer: compared. Then what a new layer makes itself.
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


_KNOWN: dict[type, dict[str, str]] = {
    DynamicSlidingWindowLayer: _SLIDING,
    DynamicIndexedLayer: _INDEXED,
    LinearAttentionLayer: _LINEAR,
    LinearAttentionAndFullAttentionLayer: _DYNAMIC | _LINEAR,
    LinearAttentionAndSlidingWindowAttentionLayer: _SLIDING | _LINEAR,
    DummyLayer: {"keys": _TENSOR, "values": _TENSOR, "is_initialized": _FLAG},
}
_PLAIN = {_FLAG, _COUNT, _DTYPE, _FLAGS, _COUNTS, _MODEL}
# Only there once tokens came.
_LATE = {"dtype", "indexer_dtype"}


def parts_of(layer: Any) -> tuple[Tensors, dict[str, Any]]:
    """Tensors of a layer on the CPU, and its plain values, by name.

    Raises:
        TypeError: a layer, or an attribute of it, that is not known.
    """
    known = _known(layer)
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for name, value in vars(layer).items():
        kind = known.get(name)
        if kind is None:
            raise TypeError(
                f"cannot save the attribute {name} of a {type(layer).__name__}, which this "
                "hf_kvret does not know: upgrade hf_kvret, or use an earlier transformers"
            )
        if kind == _TENSOR and value is not None:
            tensors[name] = _saved(value)
        elif kind == _STATES:
            tensors |= {f"{name}.{i}": _saved(x) for i, x in value.items() if x is not None}
        elif kind in (_FLAGS, _COUNTS):
            values[name] = list(value.values())
        elif kind == _DTYPE:
            values[name] = None if value is None else str(value).removeprefix("torch.")
        elif kind in (_FLAG, _COUNT, _MODEL):
            values[name] = value
    return tensors, values


def restore(
    layer: Any, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Give a new ``layer`` what ``parts_of`` took from one.

    Raises:
        ValueError: a value is missing, unknown, or does not fit the others.
    """
    known = _known(layer)
    states = range(int(getattr(layer, "number_of_states", 0)))
    names = {name for name, kind in known.items() if kind in (_TENSOR, _MADE)}
    names |= {f"{name}.{i}" for name, kind in known.items() if kind == _STATES for i in states}
    strange = [*sorted(set(tensors) - names), *sorted(set(values) - set(known))]
    if strange:
        raise ValueError(f"a {type(layer).__name__} of this model has no {strange[0][:80]}")
    there = {name: tensor.to(device) for name, tensor in tensors.items()}
    for name, kind in known.items():
        if kind == _TENSOR and (name in vars(layer) or name in there):
            setattr(layer, name, there.get(name))
        elif kind == _STATES:
            setattr(layer, name, {i: there.get(f"{name}.{i}") for i in states})
        elif kind in _PLAIN and (name in values or name not in _LATE):
            _set_plain(layer, name, kind, values, len(states))
    rows = there.get("keys")
    if LAYERS_KNOW_DTYPE and rows is not None and "dtype" not in values:
        layer.dtype = rows.dtype
    for prefix in ("", "indexer_"):
        is_used = getattr(layer, f"{prefix}keys", None) is not None
        if is_used or getattr(layer, f"{prefix}dtype", None) is not None:
            setattr(layer, f"{prefix}device", device)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer._sliding_window_tensor = layer._sliding_window_tensor.to(device)
    _check(layer)


def _set_plain(layer: Any, name: str, kind: str, values: Mapping[str, Any], states: int) -> None:
    if name not in values:
        raise ValueError(f"a {type(layer).__name__} needs {name}")
    value = values[name]
    if kind == _MODEL:
        if type(value) is not int or value != getattr(layer, name):
            raise ValueError(f"{name} is {str(value)[:40]}, this model's {getattr(layer, name)}")
        return
    if kind in (_FLAGS, _COUNTS):
        one = _is_flag if kind == _FLAGS else _is_count_or_none
        if not isinstance(value, list) or len(value) != states or not all(map(one, value)):
            raise ValueError(f"{name} is {str(value)[:40]}")
        setattr(layer, name, dict(enumerate(value)))
    elif kind == _DTYPE:
        if value is not None and (not isinstance(value, str) or value not in _FLOATS):
            raise ValueError(f"{name} is {str(value)[:40]}, none of {', '.join(sorted(_FLOATS))}")
        setattr(layer, name, None if value is None else getattr(torch, value))
    else:
        if not (_is_flag(value) if kind == _FLAG else _is_count(value)):
            raise ValueError(f"{name} is {str(value)[:40]}")
        setattr(layer, name, value)


def _check(layer: Any) -> None:
    """ValueError where values of a layer do not fit one another."""
    batch_of(layer)
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
        raise ValueError(f"keys {_form(keys)} and values {_form(values)} do not belong together")
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
        raise ValueError(f"indexer_keys {_form(keys)} are not of {length} tokens")
    if keys.dtype != getattr(layer, "indexer_dtype", None) or len(keys) != len(layer.keys):
        raise ValueError(f"indexer_keys {_form(keys)} do not fit the keys {_form(layer.keys)}")
    if positions is not None and (
        positions.ndim != 3 or positions.is_floating_point() or positions.shape[2] != length
    ):
        raise ValueError(f"indexer_position_ids {_form(positions)} are not of {length} tokens")


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
                raise ValueError(f"a state {_form(state)} is not of a layer")
        if conv is None:
            continue
        if not size or conv.shape[-1] < size or (conv.shape[-1] > size and not layer.record_past):
            raise ValueError(f"conv_states {_form(conv)} are not of conv_kernel_size {size}")
        if layer.dtype is not None and conv.dtype != layer.dtype:
            raise ValueError(f"conv_states are {conv.dtype}, not {layer.dtype}")


def batch_of(layer: Any) -> int | None:
    """Rows of the batch that a layer holds; None where it holds nothing."""
    tensors = [getattr(layer, "keys", None)]
    for name in ("conv_states", "recurrent_states"):
        tensors += getattr(layer, name, {}).values()
    sizes = {len(x) for x in tensors if x is not None and x.ndim}
    if len(sizes) > 1:
        raise ValueError(f"it holds batches of {sorted(sizes)}")
    return sizes.pop() if sizes else None


def forms_of(layer: Any) -> dict[str, tuple[Any, ...]]:
    """Dtype and sizes of a layer's tensors that do not grow with the tokens, by name."""
    forms: dict[str, tuple[Any, ...]] = {}
    for name in ("keys", "values"):
        rows = getattr(layer, name, None)
        if rows is not None and rows.ndim == 4:
            forms[name] = (rows.dtype, rows.shape[1], rows.shape[3])
    keys = getattr(layer, "indexer_keys", None)
    if keys is not None:
        forms["indexer_keys"] = (keys.dtype, keys.shape[2])
    for name in ("conv_states", "recurrent_states"):
        for i, state in getattr(layer, name, {}).items():
            if state is not None:
                last = None if name == "conv_states" else state.shape[-1]
                forms[f"{name}.{i}"] = (state.dtype, *state.shape[1:-1], last)
    return forms


def _known(layer: Any) -> dict[str, str]:
    known = _KNOWN.get(type(layer))
    if known is None:
        raise TypeError(
            f"cannot save or load a {type(layer).__name__}, which this hf_kvret does not know: "
            "upgrade hf_kvret"
        )
    return known


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def _form(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)
