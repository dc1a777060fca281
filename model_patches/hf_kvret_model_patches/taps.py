"""Taps: what every attention layer made of the tokens, before and after RoPE, while a model runs.

No public seam shows queries and keys before RoPE. They pass through ``apply_rotary_pos_emb``, a
function in the globals of the modeling module; new keys and values pass through ``Cache.update``;
and what attends is asked for at ``AttentionInterface.get_interface``. These three are wrapped while
a tap is open, and hooks on the attention layers tell the wrappers which layer is running. The
wrappers hand on the very objects they were given, so the model computes what it always did.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from hf_kvret_model_patches.tap_frames import Callback, Frame, LatentFrame, LayerTokens
from hf_kvret_model_patches.tap_targets import (
    attention_layers,
    is_latent,
    rotates_apart,
    rotation_signature,
    rotations,
)
from hf_kvret_model_patches.wrappers import Hook, WrappedFunction, once

__all__ = ["Callback", "LayerTokens", "tap_attention"]

_update = WrappedFunction(Cache, "update")
_interface = WrappedFunction(AttentionInterface, "get_interface")
_one_at_a_time = threading.Lock()
_here = threading.local()


@contextmanager
def tap_attention(model: PreTrainedModel, callback: Callback) -> Iterator[None]:
    """Call ``callback(layer, tokens)`` for each attention layer of each forward pass of ``model``.

    The call comes from the thread that runs the model, right before the layer attends. Errors of
    the callback break off the forward pass. Whatever happens inside, nothing stays behind. Other
    models that run meanwhile are not seen. Layers without attention (linear, convolutional) aren't
    either. Does not work on compiled models.

    Args:
        model: a transformers model with a decoder; in a multimodal one, its text decoder is tapped.

    Raises:
        TypeError: ``model`` is no transformers model, or ``callback`` can't be called.
        ValueError: a model that attends or rotates in a way that can't be seen from here. Some
            show it only while they run; then the forward pass raises it.
        RuntimeError: a tap is open already.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}: pass the transformers model itself")
    if not callable(callback):
        raise TypeError(f"callback is a {type(callback).__name__}: pass a function")
    layers = attention_layers(model)
    targets = rotations(model, layers.values())
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("another tap is open: close it first, or do both in one callback")
    with ExitStack() as undo:
        undo.callback(_one_at_a_time.release)
        hooks = [
            (WrappedFunction(namespace, name), _seen_rotation(namespace[name]))
            for namespace, name in targets
        ]
        hooks += [(_update, _seen_update), (_interface, once(_seen_interface))]
        for wrapped, hook in hooks:
            undo.callback(wrapped.restore)
            wrapped.apply(hook)
        for layer, module in layers.items():
            start = functools.partial(_start, layer, callback)
            undo.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(_stop, always_call=True).remove)
            if is_latent(module):
                # What makes keys and values of latents; without a cache nothing else sees these.
                projection: Any = module.kv_b_proj
                undo.callback(projection.register_forward_pre_hook(_seen_latents).remove)
        yield


def _frame() -> Frame | None:
    return getattr(_here, "frame", None)


def _start(layer: int, callback: Callback, module: nn.Module, args: Any, kwargs: Any) -> None:
    hidden = args[0] if args else kwargs.get("hidden_states")
    kind = LatentFrame if is_latent(module) else Frame
    _here.frame = kind(layer, module, callback, hidden)


def _seen_latents(module: nn.Module, args: Any) -> None:
    frame = _frame()
    if isinstance(frame, LatentFrame) and frame.latents is None:
        frame.latents = args[0]


def _stop(module: nn.Module, args: Any, output: Any) -> None:
    frame, _here.frame = _frame(), None
    # torch calls this with None for the output after an error, which then goes on its way.
    if output is not None and frame is not None and not frame.attended:
        raise ValueError(
            f"{frame.where} computed attention without the registered function: load the model "
            "with attn_implementation='sdpa'"
        )


def _seen_rotation(rotate: Callable[..., Any]) -> Hook:
    signature, apart = rotation_signature(rotate), rotates_apart(rotate)

    def hook(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        frame = _frame()
        if frame is not None:
            take_in = frame.rotated_apart if apart else frame.rotated
            take_in(inner, signature.bind(*args, **kwargs), result)
        return result

    return hook


def _seen_update(
    inner: Callable[..., Any],
    cache: Cache,
    key_states: Any,
    value_states: Any,
    layer_idx: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    frame = _frame()
    if frame is not None:
        frame.update = key_states, value_states
    return inner(cache, key_states, value_states, layer_idx, *args, **kwargs)


def _seen_interface(
    inner: Callable[..., Any], interface: AttentionInterface, *args: Any, **kwargs: Any
) -> Any:
    function = inner(interface, *args, **kwargs)
    frame = _frame()
    if frame is None:
        return function

    @functools.wraps(function)
    def attend(module: nn.Module, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        frame.attend(query, key, value, more.get("position_ids"))
        return function(module, query, key, value, *rest, **more)

    return attend
