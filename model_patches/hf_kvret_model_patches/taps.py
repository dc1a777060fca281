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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from hf_kvret_model_patches.rope_config import ROTATION, rotates_both, rotation_signature
from hf_kvret_model_patches.tap_targets import attention_layers, rotations

_one_at_a_time = threading.Lock()
_here = threading.local()


@dataclass(frozen=True)
class LayerTokens:
    """The new tokens of one forward pass in one attention layer: n of them, in slots order.

    All tensors are the model's own, detached, in its dtype and on the layer's device: don't write
    to them, and copy what has to outlive the pass.

    Attributes:
        query_before: ``[B, Hq, n, D]`` as they enter RoPE, after a norm on queries.
        key_before: ``[B, Hkv, n, D]`` as they enter RoPE, after a norm on keys.
        query: as they enter attention; without RoPE they are ``query_before``.
        key: as they enter the cache; without RoPE they are ``key_before``.
        value: ``[B, Hkv, n, Dv]``.
        cos, sin: the tables that RoPE was given, usually ``[B or 1, n, R]``; None in a layer
            without RoPE.
        hidden: ``[B, n, hidden]``, the input of the attention module; None where it has no tensor
            as its first argument.
        position_ids: ``[B or 1, n]``, as the attention function was told; None where it was not.
            Three-part positions are not told: with images in a prompt these are not RoPE's.
    """

    query_before: torch.Tensor
    key_before: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    hidden: torch.Tensor | None
    position_ids: torch.Tensor | None


Callback = Callable[[int, LayerTokens], None]


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
    namespaces = rotations(model, layers.values())
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("another tap is open: close it first, or do both in one callback")
    with ExitStack() as undo:
        undo.callback(_one_at_a_time.release)
        for namespace in namespaces:
            undo.callback(namespace.__setitem__, ROTATION, namespace[ROTATION])
            namespace[ROTATION] = _seen_rotation(namespace[ROTATION])
        undo.callback(setattr, Cache, "update", Cache.update)
        Cache.update = _seen_update(Cache.update)
        interface = AttentionInterface.get_interface
        undo.callback(setattr, AttentionInterface, "get_interface", interface)
        AttentionInterface.get_interface = _seen_interface(interface)
        for layer, module in layers.items():
            start = functools.partial(_start, layer, callback)
            undo.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(_stop, always_call=True).remove)
        yield


class _Frame:
    """What was seen since an attention module was entered."""

    def __init__(self, layer: int, name: str, callback: Callback, hidden: object) -> None:
        self.where = f"layer {layer} ({name})"
        self.hidden = hidden if isinstance(hidden, torch.Tensor) else None
        self.rotation: tuple[torch.Tensor, ...] | None = None
        # Before and after, of a query that was rotated by itself: its key comes next.
        self.alone: tuple[torch.Tensor, torch.Tensor] | None = None
        self.update: tuple[torch.Tensor, torch.Tensor] | None = None
        self.attended = False
        self._report = functools.partial(callback, layer)

    def rotated(self, *tensors: torch.Tensor) -> None:
        """Take in ``query, key, cos, sin`` before, and ``query, key`` after the rotation."""
        query, key, _, _, new_query, new_key = tensors
        if self.rotation is not None:
            raise ValueError(f"{self.where} rotates twice: its keys before RoPE are not one tensor")
        if query.data_ptr() == new_query.data_ptr() or key.data_ptr() == new_key.data_ptr():
            raise ValueError(
                f"{self.where} rotates in place, and queries and keys before RoPE are gone: load "
                "the model with use_kernels=False"
            )
        self.rotation = tensors

    def rotated_alone(
        self,
        before: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        after: torch.Tensor,
        head_axis: int,
    ) -> None:
        """Take in what was rotated by itself: the queries come first, then the keys.

        Args:
            before, after: four axes, the tokens on axis 1 or 2, the heads on the other.
            cos, sin: the tables.
            head_axis: 1 or 2.
        """
        if head_axis == 2:
            before, after = before.transpose(1, 2), after.transpose(1, 2)
        if self.alone is None:
            self.alone = before, after
        else:
            self.rotated(self.alone[0], before, cos, sin, self.alone[1], after)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_ids: torch.Tensor | None,
    ) -> None:
        """Put together what the layer was given, and report it."""
        if self.attended:
            raise ValueError(
                f"{self.where} attends twice in one pass, which a tap can't tell apart"
            )
        self.attended = True
        if self.update is not None:
            key, value = self.update
        elif key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{self.where} attends to {key.shape[2]} keys with {query.shape[2]} queries and no "
                "cache was given the new ones: run the model with use_cache=False"
            )
        if self.alone is not None and self.rotation is None:
            raise ValueError(
                f"{self.where} rotates queries and no keys: it takes them from another layer, and "
                "what they were before RoPE can't be seen; use another model, or a method without "
                "calibration"
            )
        query_before, key_before = query, key
        cos: torch.Tensor | None = None
        sin: torch.Tensor | None = None
        if self.rotation is not None:
            query_before, key_before, cos, sin, new_query, new_key = self.rotation
            if not (_same(query, new_query) and _same(key, new_key)):
                raise ValueError(
                    f"{self.where} changes queries or keys between RoPE and attention, so that "
                    "rotating what entered RoPE doesn't give what attention sees, or it runs with "
                    "a cache of its own: try use_cache=False, else use another model, or a method "
                    "without calibration"
                )
        tokens = LayerTokens(
            query_before=query_before.detach(),
            key_before=key_before.detach(),
            query=query.detach(),
            key=key.detach(),
            value=value.detach(),
            cos=_detached(cos),
            sin=_detached(sin),
            hidden=_detached(self.hidden),
            position_ids=_detached(position_ids),
        )
        self._report(tokens)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both are the same numbers in memory: one tensor, or one transposed twice."""
    return x is y or (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())


def _detached(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.detach()


def _frame() -> _Frame | None:
    return getattr(_here, "frame", None)


def _start(layer: int, callback: Callback, module: nn.Module, args: Any, kwargs: Any) -> None:
    hidden = args[0] if args else kwargs.get("hidden_states")
    _here.frame = _Frame(layer, type(module).__name__, callback, hidden)


def _stop(module: nn.Module, args: Any, output: Any) -> None:
    frame, _here.frame = _frame(), None
    # torch calls this with None for the output after an error, which then goes on its way.
    if output is not None and frame is not None and not frame.attended:
        raise ValueError(
            f"{frame.where} computed attention without the registered function: load the model "
            "with attn_implementation='sdpa'"
        )


def _seen_rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    signature, both = rotation_signature(original), rotates_both(original)

    @functools.wraps(original)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        frame = _frame()
        if frame is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if both:
                frame.rotated(*(given[name] for name in ("q", "k", "cos", "sin")), *result)
            else:
                tensors = (given[name] for name in ("x", "cos", "sin"))
                frame.rotated_alone(*tensors, result, given.get("unsqueeze_dim", 1))
        return result

    return rotate


def _seen_update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(
        self: Cache, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        frame = _frame()
        if frame is not None:
            frame.update = key_states, value_states
        return original(self, key_states, value_states, layer_idx, *args, **kwargs)

    return update


def _seen_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_interface(self: AttentionInterface, *args: Any, **kwargs: Any) -> Any:
        function = original(self, *args, **kwargs)
        frame = _frame()
        if frame is None:
            return function

        @functools.wraps(function)
        def attend(
            module: nn.Module, query: Any, key: Any, value: Any, *rest: Any, **more: Any
        ) -> Any:
            frame.attend(query, key, value, more.get("position_ids"))
            return function(module, query, key, value, *rest, **more)

        return attend

    return get_interface
