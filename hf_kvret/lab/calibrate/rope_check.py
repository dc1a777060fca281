"""A trial before calibration: are un-rotated keys the same wherever a text begins?"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_kvret.lab.calibrate.taps import LayerTokens, attention_layers, tap_attention
from hf_kvret_model_patches.rope import LAYOUTS, Rope, has_rope

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
    errors = {}
    for name, rope in ropes.items():
        near, far = (
            _rotary(rope.unrotate(keys.float().cpu(), positions), ropes["half"])
            for keys, positions in passes
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


def _rotary(keys: torch.Tensor, rope: Rope) -> torch.Tensor:
    """The elements that ``rope`` rotates; the others are the same whatever it does."""
    size = rope.rotary_dim
    return keys[..., -size:] if rope.last else keys[..., :size]


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
