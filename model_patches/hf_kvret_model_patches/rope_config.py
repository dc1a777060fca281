"""What a model's configuration and code say about RoPE in one of its layers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROTATION = "apply_rotary_pos_emb"
"""What transformers calls its rotation, in every modeling module that has one like Llama's."""

LATENT_ROTATIONS = (ROTATION, f"{ROTATION}_interleave", "apply_rotary_emb")
"""What it calls those of latent attention; the last takes complex numbers, ``freqs_cis``."""

_SCALED = ("linear", "llama3", "yarn", "proportional")
_CHANGING = {
    "dynamic": "frequencies that change with the length of the text",
    "longrope": "one set of frequencies for short texts and another for long ones",
}
# Their attention rotates in layers that slide and nowhere else; the second set does so only where
# the config has a sliding window at all.
_SLIDING_ONLY = {"cohere2"}
_SLIDING_ONLY_IF_ANY = {"exaone4", "exaone4_5_text", "exaone_moe"}


def text_config(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The configuration of one layer of the text decoder, after a look whether it has the layer.

    That of the whole decoder where layers are alike.

    Raises:
        TypeError: ``config`` is not a transformers configuration.
        ValueError: the model has no layer of that number.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config is a {type(config).__name__}: pass model.config")
    text = config.get_text_config(decoder=True)
    if not 0 <= layer < text.num_hidden_layers:
        raise ValueError(f"layer={layer}: the model has layers 0 to {text.num_hidden_layers - 1}")
    return text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text


def rotates(config: PreTrainedConfig, layer: int) -> bool:
    """Whether queries and keys of the layer are rotated, as far as the configuration tells.

    Raises:
        TypeError, ValueError: as in ``text_config``.
    """
    text = text_config(config, layer)
    if not getattr(text, "rope_parameters", None) or _parameters(text, layer)[0] is None:
        return False
    listed = getattr(text, "no_rope_layers", None)
    if listed:
        return bool(listed[layer])  # the list's name lies: 1 is a layer with RoPE
    slides = _kind(text, layer) == "sliding_attention"
    if text.model_type in _SLIDING_ONLY:
        return slides
    if text.model_type in _SLIDING_ONLY_IF_ANY:
        return slides or text.sliding_window is None
    return True


def rotates_last(config: PreTrainedConfig) -> bool:
    """Whether the last numbers of a head are rotated, as in latent attention, not the first."""
    return bool(getattr(config.get_text_config(decoder=True), "kv_lora_rank", None))


def frequencies(config: PreTrainedConfig, layer: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies ``[rotary_dim / 2]``, fp32 on the CPU, and the factor on cos and sin.

    Scaled frequencies come from transformers itself, so that they have the model's very bits: at
    large positions the last bit of a frequency moves the angle.

    Raises:
        TypeError, ValueError: as in ``text_config``; no RoPE at all; a kind of RoPE whose
            frequencies are not the same at all lengths, or that we don't know.
    """
    text = text_config(config, layer)
    parameters, nested = _parameters(text, layer)
    if parameters is None:
        raise ValueError(
            f"config.rope_parameters has nothing for layer {layer}: use layout='none' for it"
        )
    name = parameters.get("rope_type", "default")
    # Sizes are computed on the CPU also where someone builds a model on another default device.
    with torch.device("cpu"):
        if name in _SCALED:
            options = {"layer_type": _kind(text, layer)} if nested else {}
            inv_freq, factor = ROPE_INIT_FUNCTIONS[name](text, torch.device("cpu"), **options)
            return inv_freq.float(), float(factor)
        if name == "default":
            return _plain_frequencies(text, parameters), 1.0
    if name in _CHANGING:
        raise ValueError(
            f"rope_type={name!r} in layer {layer}: {_CHANGING[name]}, so a key cannot be "
            "un-rotated once the text has grown: set config.rope_parameters to 'yarn', 'linear' "
            "or 'default' before loading, or use a method that keeps rotated keys"
        )
    raise ValueError(
        f"rope_type={name!r} in layer {layer} is not known; known are 'default', "
        f"{', '.join(map(repr, _SCALED))}: use a method that keeps rotated keys"
    )


def layout_of(config: PreTrainedConfig, layer: int) -> str:
    """How the model's own rotation pairs the numbers of a head: ``"half"`` or ``"interleaved"``.

    The configuration doesn't say it. So the rotation is taken from the modeling module that belongs
    to the configuration's, and turns ``0, 1, 2, ...`` by 90 degrees.

    Raises:
        TypeError, ValueError: as in ``text_config``; there is no such module or rotation, or it
            pairs the numbers in another way.
    """
    text = text_config(config, layer)
    home = type(text).__module__.replace(".configuration_", ".modeling_")
    remedy = (
        "give layout='half' or 'interleaved' where you know it; check_rope(model) in "
        "hf_kvret_model_patches.rope_check finds it"
    )
    names = LATENT_ROTATIONS if rotates_last(text) else (ROTATION,)
    try:
        module = importlib.import_module(home)
        rotation = next(getattr(module, name) for name in names if hasattr(module, name))
    except (ImportError, StopIteration) as error:
        raise ValueError(f"{home} has no {' or '.join(names)} to look at: {remedy}") from error
    found = _quarter_turn(rotation)
    # A pair (x, y) becomes (-y, x): the first two numbers tell who their partners are.
    if found[:2] in ([-4.0, -5.0], [-1.0, -3.0]):
        # The second moves pairs of neighbours into two halves while it turns them.
        return "half"
    if found[:2] == [-1.0, 0.0]:
        return "interleaved"
    raise ValueError(
        f"the rotation of {home} makes {found} of 0 to 7 at 90 degrees; known are 'half', which "
        "makes [-4, -5, -6, -7, 0, 1, 2, 3], and 'interleaved', which makes [-1, 0, -3, 2, ...]: "
        "use a method that keeps rotated keys"
    )


def _quarter_turn(rotation: Any) -> list[float]:
    """``0 .. 7`` turned by 90 degrees, or an empty list where ``rotation`` can't be called so."""
    x = torch.arange(8.0, device="cpu").view(1, 1, 1, 8)
    # Most rotations take tables as wide as a head, some of half that width or of complex numbers.
    cos, sin = torch.zeros(1, 1, 8, device="cpu"), torch.ones(1, 1, 8, device="cpu")
    half = cos[..., :4], sin[..., :4]
    both = ((x, x, *tables) for tables in ((cos, sin), half, (torch.complex(*half),)))
    # A few take queries or keys.
    for arguments in (*both, (x, cos, sin)):
        try:
            result = rotation(*arguments)
            query = result if isinstance(result, torch.Tensor) else result[0]
        except (RuntimeError, TypeError, ValueError):
            continue
        return query.flatten().tolist()
    return []


def _kind(text: PreTrainedConfig, layer: int) -> str | None:
    kinds = getattr(text, "layer_types", None)
    return kinds[layer] if kinds else None


def _parameters(text: PreTrainedConfig, layer: int) -> tuple[Mapping[str, Any] | None, bool]:
    """The layer's RoPE parameters, None for none, and whether they are listed by kind of layer."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return None, False
    nested = any(isinstance(part, Mapping) for part in parameters.values())
    return (parameters.get(_kind(text, layer)) if nested else parameters), nested


def _plain_frequencies(text: PreTrainedConfig, parameters: Mapping[str, Any]) -> torch.Tensor:
    """``theta ** (-2i / R)`` for i below R / 2, where R numbers of each head are rotated."""
    if rotates_last(text):
        rotary_dim = text.qk_rope_head_dim
    else:
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / (parameters["rope_theta"] ** exponents)
