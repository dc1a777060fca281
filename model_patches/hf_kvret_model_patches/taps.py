"""Taps: what every attention layer made of the tokens, before and after RoPE, while a model runs.

No public seam shows queries and keys before RoPE. They pass through ``apply_rotary_pos_emb``, a
function in the globals of the modeling module; new keys and values pass through ``Cache.update``;
and ``AttentionInterface.get_interface`` gives the function that attends. These three are wrapped
while a tap is open, and hooks on the attention layers tell the wrappers which layer is running. The
wrappers hand on the very objects that they get, so the model computes what it always did.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from hf_kvret_model_patches.decoders import decoder_of
from hf_kvret_model_patches.wrappers import Hook, WrappedFunction, once

ROTATION = "apply_rotary_pos_emb"
"""Name of transformers' rotation, in every modeling module that has one like Llama's."""

LATENT_ROTATIONS = (ROTATION, f"{ROTATION}_interleave", "apply_rotary_emb")
"""Names of the rotations of latent attention; the last takes complex numbers, ``freqs_cis``."""

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_PARAMETERS = ["q", "k", "cos", "sin"]
_COMPLEX_PARAMETERS = ["xq", "xk", "freqs_cis"]
_SINGLE_PARAMETERS = ["x", "cos", "sin"]
# Largest relative difference between queries that attend and a multiple of those that RoPE gave.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

_update = WrappedFunction(Cache, "update")
_interface = WrappedFunction(AttentionInterface, "get_interface")
_one_at_a_time = threading.Lock()
_here = threading.local()


@dataclass(frozen=True)
class LayerTokens:
    """The n new tokens of one forward pass in one attention layer, in their order.

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
        position_ids: ``[B or 1, n]``, as the attention function got them; None without. Models
            don't pass three-part positions on: with images in a prompt these are not RoPE's.
        latent: the attention module, where attention is latent; else None. Then ``key`` is what the
            cache holds, rows ``[B, 1, n, rank + r]`` of a latent and a rotated key, and ``value``
            their first part; ``query`` is each head's, not absorbed. Only the last r elements of
            rows and queries are rotated. Models may order these anew when they rotate, or scale
            queries after it: ``key_before`` and ``query_before`` are what the same order and the
            same scale would be without rotation.
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
    latent: nn.Module | None = None


Callback = Callable[[int, LayerTokens], None]


@contextmanager
def tap_attention(model: PreTrainedModel, callback: Callback) -> Iterator[None]:
    """Call ``callback(layer, tokens)`` for each attention layer of each forward pass of ``model``.

    The call comes from the thread that runs the model, right before the layer attends. Errors of
    the callback break off the forward pass. Whatever happens inside, nothing stays behind. Other
    models that run meanwhile are not seen. Layers without attention (linear, convolutional) aren't
    either, nor those that read another layer's keys. Does not work on compiled models.

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
    layers = _attention_layers(model)
    rotations = _rotations(model, layers.values())
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("another tap is open: close it first, or do both in one callback")
    with ExitStack() as undo:
        undo.callback(_one_at_a_time.release)
        hooks = [
            (WrappedFunction(namespace, name), _rotation_hook(namespace[name]))
            for namespace, name in rotations
        ]
        hooks += [(_update, _update_hook), (_interface, once(_interface_hook))]
        for wrapped, hook in hooks:
            undo.callback(wrapped.restore)
            wrapped.apply(hook)
        for layer, module in layers.items():
            enter = functools.partial(_enter_layer, layer, callback)
            undo.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(_leave_layer, always_call=True).remove)
            if _is_latent(module):
                # It makes keys and values of latents; without a cache nothing else sees these.
                projection: Any = module.kv_b_proj
                undo.callback(projection.register_forward_pre_hook(_latents_hook).remove)
        yield


def _attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The modules of the text decoder that call a registered attention function, by layer number.

    They are known by their code, not by their names.
    """
    layers: dict[int, nn.Module] = {}
    for module in decoder_of(model).modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or _INTERFACE not in _names_in_forward(module):
            continue
        if _reads_another(module):
            continue
        if layer in layers:
            raise ValueError(
                f"{type(model).__name__} has two attention modules for layer {layer}, "
                f"{type(layers[layer]).__name__} and {type(module).__name__}: only decoders with "
                "one self-attention in a layer can be tapped"
            )
        layers[layer] = module
    if not layers:
        raise ValueError(
            f"no layer of {type(model).__name__} calls transformers' registered attention "
            "functions, so its queries and keys can't be seen: use another model"
        )
    return layers


def _reads_another(module: nn.Module) -> bool:
    """Whether an attention module has no keys of its own (Gemma-3n, Gemma-4)."""
    return getattr(module, "is_kv_shared_layer", False)


def _is_latent(module: nn.Module) -> bool:
    """Whether an attention module expands latents of all tokens into keys and values of heads.

    Where an indexer chooses tokens, more than queries and keys is rotated, and False is returned.
    """
    return hasattr(type(module), "expand_kv") and not hasattr(module, "indexer")


def _rotations(
    model: PreTrainedModel, modules: Iterable[nn.Module]
) -> list[tuple[dict[str, Any], str]]:
    """The globals in which ``modules`` look their rotation up, and its name there.

    It is ``apply_rotary_pos_emb``, of ``q, k, cos, sin`` or of ``x, cos, sin``, or, for latent
    attention, a relative of it. The list is empty for models without RoPE.

    Raises:
        ValueError: a module rotates by another function, or the configuration speaks of RoPE and
            the code doesn't.
    """
    text = model.config.get_text_config(decoder=True)
    rotations: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    for cls, module in {type(module): module for module in modules}.items():
        namespace = inspect.unwrap(cls.forward).__globals__
        names = [
            name
            for name in _names_in_forward(module)
            if "rot" in name.lower() and callable(namespace.get(name))
        ]
        is_latent = _is_latent(module)
        if not names and (is_latent or not getattr(text, "rope_parameters", None)):
            continue
        if not (set(names) <= set(LATENT_ROTATIONS) if is_latent else names == [ROTATION]):
            rotation = " and ".join(names) or "no function that we know"
            raise ValueError(
                f"{cls.__name__} rotates by {rotation}, not by {ROTATION} alone: its queries and "
                "keys before RoPE can't be seen; use another model, or a method without calibration"
            )
        for name in names:
            parameters = list(_signature(namespace[name]).parameters)
            expected = _COMPLEX_PARAMETERS if name == LATENT_ROTATIONS[2] else _PARAMETERS
            if _rotates_one(namespace[name]):
                expected = _SINGLE_PARAMETERS
            if parameters[: len(expected)] != expected:
                raise ValueError(
                    f"{name} of {cls.__name__} takes {', '.join(parameters)}, not "
                    f"{', '.join(expected)}: its queries and keys before RoPE can't be seen; use "
                    "another model, or a method without calibration"
                )
            rotations[id(namespace), name] = namespace, name
    return list(rotations.values())


def _rotates_one(rotate: Callable[..., Any]) -> bool:
    """Whether a rotation takes queries or keys, ``x, cos, sin``, not both at once (Gemma-4)."""
    return list(_signature(rotate).parameters)[:3] == _SINGLE_PARAMETERS


def _signature(rotate: Callable[..., Any]) -> inspect.Signature:
    """Parameters of a function that rotates.

    Beside the package kernels, older transformers (5.17) make a module of the function, which
    takes anything; its ``forward`` is the function.
    """
    inner = inspect.unwrap(rotate)
    return inspect.signature(inner.forward if isinstance(inner, nn.Module) else inner)


def _names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Names of globals and attributes in the code of ``forward``."""
    names: tuple[str, ...] = inspect.unwrap(type(module).forward).__code__.co_names
    return names


def _frame() -> _Frame | None:
    return getattr(_here, "frame", None)


def _enter_layer(layer: int, callback: Callback, module: nn.Module, args: Any, kwargs: Any) -> None:
    hidden = args[0] if args else kwargs.get("hidden_states")
    cls = _LatentFrame if _is_latent(module) else _Frame
    _here.frame = cls(layer, module, callback, hidden)


def _leave_layer(module: nn.Module, args: Any, output: Any) -> None:
    frame, _here.frame = _frame(), None
    # torch calls this with None for the output after an error, which then goes on its way.
    if output is not None and frame is not None and not frame.has_attended:
        raise ValueError(
            f"{frame.owner} computed attention without the registered function: load the model "
            "with attn_implementation='sdpa'"
        )


def _latents_hook(module: nn.Module, args: Any) -> None:
    frame = _frame()
    if isinstance(frame, _LatentFrame) and frame.latents is None:
        frame.latents = args[0]


def _rotation_hook(rotate: Callable[..., Any]) -> Hook:
    signature, rotates_one = _signature(rotate), _rotates_one(rotate)

    def hook(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        frame = _frame()
        if frame is not None:
            rotated = frame.rotated_one if rotates_one else frame.rotated
            rotated(inner, signature.bind(*args, **kwargs), result)
        return result

    return hook


def _update_hook(
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


def _interface_hook(
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


class _Rotation(NamedTuple):
    """Queries and keys before RoPE, its tables, and queries and keys after it."""

    query: torch.Tensor
    key: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    new_query: torch.Tensor
    new_key: torch.Tensor


class _Frame:
    """What hooks saw since an attention module was entered."""

    is_latent = False

    def __init__(self, layer: int, module: nn.Module, callback: Callback, hidden: object) -> None:
        self.module: Any = module
        self.owner = f"layer {layer} ({type(module).__name__})"
        self.hidden = hidden if isinstance(hidden, torch.Tensor) else None
        self.rotation: _Rotation | None = None
        self.update: tuple[torch.Tensor, torch.Tensor] | None = None
        self.has_attended = False
        # Before and after, of queries that were rotated by themselves.
        self._queries: tuple[torch.Tensor, torch.Tensor] | None = None
        self._report = functools.partial(callback, layer)

    def rotated(
        self, rotate: Callable[..., Any], arguments: inspect.BoundArguments, result: Any
    ) -> None:
        """Take in the ``result`` of ``rotate``, queries and keys, for its ``arguments``."""
        if self.rotation is not None:
            raise ValueError(f"{self.owner} rotates twice: its keys before RoPE are not one tensor")
        self.rotation = _Rotation(*self._before(rotate, arguments), *result)
        before = self.rotation.query, self.rotation.key
        if any(old.data_ptr() == new.data_ptr() for old, new in zip(before, result, strict=True)):
            raise ValueError(
                f"{self.owner} rotates in place, and queries and keys before RoPE are gone: load "
                "the model with use_kernels=False"
            )

    def rotated_one(
        self, rotate: Callable[..., Any], arguments: inspect.BoundArguments, result: Any
    ) -> None:
        """As ``rotated``, of a rotation that gets queries first, and keys in a second call.

        With ``unsqueeze_dim=2`` they are ``[B, n, H, D]``.
        """
        arguments.apply_defaults()
        before = arguments.arguments.pop("x")
        if arguments.arguments.get("unsqueeze_dim") == 2:
            before, result = before.transpose(1, 2), result.transpose(1, 2)
        if self._queries is None:
            self._queries = before, result
            return
        query, new_query = self._queries
        arguments.arguments |= {"q": query, "k": before}
        self.rotated(rotate, arguments, (new_query, result))

    def _before(
        self, rotate: Callable[..., Any], arguments: inspect.BoundArguments
    ) -> Iterable[torch.Tensor]:
        """The first four of ``_Rotation``."""
        return (arguments.arguments[name] for name in _PARAMETERS)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_ids: torch.Tensor | None,
    ) -> None:
        """Put together what hooks saw of the layer, and report it."""
        if self.has_attended:
            raise ValueError(
                f"{self.owner} attends twice in one pass, which a tap can't tell apart"
            )
        self.has_attended = True
        tables = (None, None) if self.rotation is None else (self.rotation.cos, self.rotation.sin)
        tensors = *self._tokens(query, key, value), *tables, self.hidden, position_ids
        values: list[Any] = [None if x is None else x.detach() for x in tensors]
        self._report(LayerTokens(*values, *([self.module] if self.is_latent else [])))

    def _tokens(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The first five of ``LayerTokens``."""
        if self.update is not None:
            key, value = self.update
        else:
            self._check_new(query, key)
        if self.rotation is None and self._queries is not None:
            raise ValueError(
                f"{self.owner} rotates queries and no keys: it takes them from another layer, and "
                "what they were before RoPE can't be seen; use another model, or a method without "
                "calibration"
            )
        if self.rotation is None:
            return query, key, query, key, value
        if not (_same(query, self.rotation.new_query) and _same(key, self.rotation.new_key)):
            raise self._changed()
        return self.rotation.query, self.rotation.key, query, key, value

    def _check_new(self, query: torch.Tensor, key: torch.Tensor) -> None:
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{self.owner} attends to {key.shape[2]} keys with {query.shape[2]} queries and no "
                "cache was given the new ones: run the model with use_cache=False"
            )

    def _changed(self) -> ValueError:
        return ValueError(
            f"{self.owner} changes queries or keys between RoPE and attention, so that rotating "
            "what entered RoPE doesn't give what attention sees, or it runs with a cache of its "
            "own: try use_cache=False, else use another model, or a method without calibration"
        )


class _LatentFrame(_Frame):
    """The same of a layer with latent attention, whose cache holds latents and rotated keys.

    Attributes:
        latents: keys and values were made of them.
    """

    is_latent = True
    latents: torch.Tensor | None = None

    def _before(
        self, rotate: Callable[..., Any], arguments: inspect.BoundArguments
    ) -> Iterable[torch.Tensor]:
        """Queries and keys as ``rotate`` gives them at angle 0, in the order of its result."""
        values = arguments.arguments
        if "freqs_cis" in values:
            table = values["freqs_cis"]
            cos, sin = table.real, table.imag
            values["freqs_cis"] = torch.ones_like(table)
        else:
            cos, sin = values["cos"], values["sin"]
            values |= {"cos": torch.ones_like(cos), "sin": torch.zeros_like(sin)}
        return *rotate(*arguments.args, **arguments.kwargs), cos, sin

    def _tokens(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See ``LayerTokens``. Expanded keys end with the rotated one, the same in all heads."""
        if self.update is not None:
            latents, rotated = self.update
        elif self.latents is not None:
            self._check_new(query, key)
            latents, rotated = self.latents, key[:, :1, :, self.module.qk_nope_head_dim :]
        else:
            raise ValueError(
                f"{self.owner} attends without having made keys of latents, and no cache was given "
                "these: run the model with use_cache=False"
            )
        row = torch.cat([latents, rotated], dim=-1)
        if self.rotation is None:
            return query, row, query, row, latents
        if not torch.equal(rotated, self.rotation.new_key):
            raise self._changed()
        plain, rotary = query.split([self.module.qk_nope_head_dim, rotated.shape[3]], dim=-1)
        unrotated = self.rotation.query * self._scale(rotary, self.rotation.new_query)
        query_before = torch.cat([plain, unrotated.to(query.dtype)], dim=-1)
        return query_before, torch.cat([latents, self.rotation.key], dim=-1), query, row, latents

    def _scale(self, query: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        """``[B, 1, n, 1]`` fp32: the factor by token from ``rotated [B, H, n, r]`` to ``query``."""
        scaled, plain = query.float(), rotated.float()
        norm = plain.square().sum((1, 3), keepdim=True).clamp(min=1e-30)
        scale = (scaled * plain).sum((1, 3), keepdim=True) / norm
        residual = (scaled - scale * plain).norm()
        if residual > _TOLERANCE.get(query.dtype, 0.0) * scaled.norm():
            raise self._changed()
        # The factor is exactly 1 where nothing was done.
        return torch.where((scaled == plain).all(3, keepdim=True).all(1, keepdim=True), 1.0, scale)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both are one tensor, or views of the same memory, shape and strides."""
    return x is y or (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())
