"""Taps: queries, keys and values of every attention layer while a model runs, as attention gets
them.

``AttentionInterface.get_interface`` gives the function that attends. It is wrapped while a tap is
open, and hands on the very objects that it gets, so the model computes what it always did.
A trial before calibration finds the rotation of each layer by them: are un-rotated keys the same
wherever a text begins?
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from hf_kvret_model_patches.decoders import decoder_of
from hf_kvret_model_patches.rope import LAYOUTS, Rope, has_rope
from hf_kvret_model_patches.wrappers import WrappedMethod

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_get_interface = WrappedMethod(AttentionInterface, "get_interface")


@dataclass(frozen=True)
class LayerTokens:
    """The n tokens of a pass in one attention layer.

    All tensors are the model's own, detached, in its dtype and on the layer's device: don't write
    to them, and copy what has to outlive the pass.

    Attributes:
        query: ``[B, Hq, n, D]`` as they enter attention, after RoPE.
        key: ``[B, Hkv, n, D]`` as a cache holds them, after RoPE.
        value: ``[B, Hkv, n, Dv]``.
        latent: the attention module, where attention is latent; else None. Then ``key`` is what the
            cache holds, rows ``[B, 1, n, rank + r]`` of a latent and a rotated key, and ``value``
            their first part; ``query`` is each head's, not absorbed. Only the last r elements of
            rows and queries are rotated.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    latent: nn.Module | None = None


def before_rope(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Queries or keys ``[B, H, n, D]`` before RoPE, un-rotated as caches do it, in their dtype.

    Args:
        x: of a text from position 0 on, without padding.
        rope: of the layer, on any device.
    """
    return rope.to(x.device).unrotate(x, torch.arange(x.shape[2], device=x.device))


@contextmanager
def tap_attention(
    model: PreTrainedModel, callback: Callable[[int, LayerTokens], None]
) -> Iterator[None]:
    """Call ``callback(layer, tokens)`` for each attention layer of each pass of ``model``.

    The call comes right before the layer attends; its errors break off the pass. Passes must run
    with ``use_cache=False``. Other models that run meanwhile are not seen, nor are layers that
    read another layer's keys, or have no attention. Does not work on compiled models.

    Args:
        model: a transformers model with a decoder; in a multimodal one, its text decoder is tapped.

    Raises:
        ValueError: a model that attends in a way that can't be seen from here; from the pass, a
            layer that reads keys of a cache.
    """
    layers = attention_layers(model)
    latents: dict[nn.Module, torch.Tensor] = {}

    def get_interface(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        function = inner(*args, **kwargs)

        @functools.wraps(function)
        def attend(
            module: nn.Module, query: Any, key: Any, value: Any, *rest: Any, **more: Any
        ) -> Any:
            if module in layers:
                tokens = _tokens(module, query, key, value, latents.pop(module, None))
                callback(layers[module], tokens)
            return function(module, query, key, value, *rest, **more)

        return attend

    def keep_latents(module: nn.Module, projection: nn.Module, args: Any) -> None:
        latents[module] = args[0]

    with ExitStack() as undo:
        undo.callback(_get_interface.restore)
        _get_interface.apply(get_interface)
        for module in layers:
            # It makes keys and values of latents; without a cache nothing else sees these.
            if hasattr(module, "expand_kv"):
                hook = functools.partial(keep_latents, module)
                undo.callback(module.kv_b_proj.register_forward_pre_hook(hook).remove)
        yield


def attention_layers(model: PreTrainedModel) -> dict[Any, int]:
    """Layer numbers of the text decoder's modules that call a registered attention function.

    They are known by their code, not by their names. Those without keys of their own (Gemma-3n,
    Gemma-4) are left out.

    Raises:
        ValueError: there is none, or a layer has two.
    """
    layers: dict[Any, int] = {}
    for module in decoder_of(model).modules():
        layer = getattr(module, "layer_idx", None)
        names = inspect.unwrap(type(module).forward).__code__.co_names
        if not isinstance(layer, int) or _INTERFACE not in names:
            continue
        if getattr(module, "is_kv_shared_layer", False):
            continue
        if layer in layers.values():
            raise ValueError(
                f"{type(model).__name__} has two attention modules for layer {layer}: only "
                "decoders with one self-attention in a layer can be calibrated"
            )
        layers[module] = layer
    if not layers:
        raise ValueError(
            f"no layer of {type(model).__name__} calls transformers' registered attention "
            "functions, so its queries and keys can't be seen: use another model"
        )
    return layers


def _tokens(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    latents: torch.Tensor | None,
) -> LayerTokens:
    """What attention gets; expanded keys end with the rotated one, the same in all heads."""
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{type(module).__name__} attends to {key.shape[2]} keys with {query.shape[2]} "
            "queries: run the model with use_cache=False"
        )
    if latents is None:
        return LayerTokens(query.detach(), key.detach(), value.detach())
    rotated = key[:, :1, :, module.qk_nope_head_dim :]
    row = torch.cat([latents, rotated], dim=-1)
    return LayerTokens(query.detach(), row.detach(), latents.detach(), module)


_TOLERANCE = 0.3
"""Largest relative error: roundings and scales by position add up over layers, to some hundredths
in bf16. A wrong layout, frequency or position makes an error near 1."""

_ROWS, _TOKENS, _PADDING = 2, 12, 5
# Beyond this position some models scale their queries anew.
_FAR = 8192


def check_rope(model: PreTrainedModel) -> dict[int, Rope]:
    """The rotation of each attention layer, by layer number, on the CPU, after a trial.

    The model runs twice over a few tokens, at its first positions and at far ones. RoPE is relative
    to positions, so keys that are un-rotated must be the same in both passes. No rotation
    and both layouts are tried, and the best one is returned: it counts more than what ``Rope.of``
    reads from configuration and code. Layers that don't rotate get a ``Rope`` with layout
    ``"none"``, those without parameters in the configuration without a trial.

    Raises:
        ValueError: as ``tap_attention``, ``Rope.of``, ``input_device``; a layer that no candidate
            reproduces, or that attends by itself.
    """
    text = model.config.get_text_config(decoder=True)
    # Low ids are often special tokens, and those of images are where the vocabulary ends.
    ids = 10 + torch.arange(_ROWS * _TOKENS).view(_ROWS, -1) % max(1, text.vocab_size - 10)
    mask = torch.ones_like(ids)
    mask[1, :_PADDING] = 0
    device = input_device(model)
    first = (mask.cumsum(-1) - 1).clamp(min=0)
    far = min(getattr(text, "max_position_embeddings", None) or _FAR, _FAR) - _TOKENS
    places = (first, first + far)
    passes: list[dict[int, LayerTokens]] = []
    for positions in places:
        seen: dict[int, LayerTokens] = {}
        with torch.no_grad(), tap_attention(model, seen.__setitem__):
            model(
                ids.to(device),
                attention_mask=mask.to(device),
                position_ids=positions.to(device),
                use_cache=False,
            )
        passes.append(seen)
    ropes = {}
    for layer in sorted(attention_layers(model).values()):
        if layer not in passes[0]:
            raise ValueError(
                f"layer {layer} attends without the registered function: load the model with "
                "attn_implementation='sdpa'"
            )
        keys = [seen[layer].key for seen in passes]
        if has_rope(model.config, layer):
            ropes[layer] = _best(model.config, layer, list(zip(keys, places, strict=True)), mask)
        else:
            ropes[layer] = Rope.of(model.config, layer, "none")
    return ropes


def _best(
    config: PreTrainedConfig,
    layer: int,
    passes: list[tuple[torch.Tensor, torch.Tensor]],
    valid: torch.Tensor,
) -> Rope:
    """The candidate with the smallest error; ValueError where that is above the tolerance.

    ``passes`` are keys ``[B, H, n, D]`` and their positions ``[B, n]``, twice.
    """
    ropes = {name: Rope.of(config, layer, name) for name in LAYOUTS}
    # The other elements are the same whatever a layout does.
    size, errors = ropes["half"].rotary_dim, {}
    rotated = slice(-size, None) if ropes["half"].last else slice(size)
    for name, rope in ropes.items():
        near, far = (
            rope.unrotate(keys.float().cpu(), positions)[..., rotated] for keys, positions in passes
        )
        errors[name] = _error(near, far, valid)
    best = min(errors, key=errors.__getitem__)
    if errors[best] > _TOLERANCE:
        tried = ", ".join(f"{error:.1e} ({name})" for name, error in errors.items())
        raise ValueError(
            f"layer {layer}: keys at far positions, un-rotated, are off by {tried}, and "
            f"{_TOLERANCE} is allowed. model.to(dtype) rounds the frequencies of RoPE too: load "
            "with from_pretrained(..., dtype=...) instead. If the model was loaded so, its RoPE is "
            "not the one of its config: use a method that keeps rotated keys"
        )
    return ropes[best]


def _error(keys: torch.Tensor, others: torch.Tensor, valid: torch.Tensor) -> float:
    """Root mean square of the valid tokens' relative errors, ``[B, H, n, D]``; infinite for NaN."""
    difference = (others - keys).square().sum((1, 3))
    error = (difference / keys.square().sum((1, 3)).clamp(min=1e-30))[valid.bool()].mean().sqrt()
    return float(error.nan_to_num(nan=float("inf")))


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids belong: the device on which the model's embedding computes.

    ``model.device`` is where a weight is, and accelerate keeps the weights that it offloads on
    ``meta`` until their module runs.

    Raises:
        ValueError: the embedding is on no device, and nothing will bring it to one.
    """
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    for candidate in (hook, *getattr(hook, "hooks", ())):
        device = getattr(candidate, "execution_device", None)
        if device is not None:
            return torch.device(device)
    device = next(embedding.parameters()).device
    if device.type == "meta":
        raise ValueError(
            "the model's embedding is on no device: load the weights, and offload with accelerate "
            "(device_map), which brings it to one"
        )
    return device
