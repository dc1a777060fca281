"""What a tap hangs on: a model's attention modules, and the functions that rotate for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_kvret_model_patches.decoders import decoder_of
from hf_kvret_model_patches.rope_config import LATENT_ROTATIONS, ROTATION

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_PARAMETERS = ["q", "k", "cos", "sin"]
_COMPLEX_PARAMETERS = ["xq", "xk", "freqs_cis"]
_SINGLE_PARAMETERS = ["x", "cos", "sin"]


def attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The modules of the text decoder that call a registered attention function, by layer number.

    They are known by their code, not by their names.

    Raises:
        ValueError: there are none, or two have the same number.
    """
    layers: dict[int, nn.Module] = {}
    for module in decoder_of(model).modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or _INTERFACE not in _code(module).co_names:
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


def is_latent(module: nn.Module) -> bool:
    """Whether an attention module expands latents of all tokens into keys and values of heads.

    Where an indexer chooses tokens, more than queries and keys is rotated, and False is returned.
    """
    return hasattr(type(module), "expand_kv") and not hasattr(module, "indexer")


def rotations(
    model: PreTrainedModel, modules: Iterable[nn.Module]
) -> list[tuple[dict[str, Any], str]]:
    """Where ``modules`` look their rotation up: globals of their modeling modules, and a name.

    What stands there is ``apply_rotary_pos_emb``, of ``q, k, cos, sin`` or of ``x, cos, sin``, or,
    for latent attention, a relative of it. The list is empty for models without RoPE.

    Raises:
        ValueError: a module rotates by another function, or the configuration speaks of RoPE and
            the code doesn't.
    """
    text = model.config.get_text_config(decoder=True)
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    for kind, module in {type(module): module for module in modules}.items():
        namespace = inspect.unwrap(kind.forward).__globals__
        names = [
            name
            for name in _code(module).co_names
            if "rot" in name.lower() and callable(namespace.get(name))
        ]
        if not names and (is_latent(module) or not getattr(text, "rope_parameters", None)):
            continue
        known = set(names).issubset(LATENT_ROTATIONS) if is_latent(module) else names == [ROTATION]
        if not known:
            how = " and ".join(names) or "no function that we know"
            raise ValueError(
                f"{kind.__name__} rotates by {how}, not by {ROTATION} alone: its queries and keys "
                "before RoPE can't be seen; use another model, or a method without calibration"
            )
        for name in names:
            parameters = list(rotation_signature(namespace[name]).parameters)
            expected = _COMPLEX_PARAMETERS if name == LATENT_ROTATIONS[2] else _PARAMETERS
            if rotates_apart(namespace[name]):
                expected = _SINGLE_PARAMETERS
            if parameters[: len(expected)] != expected:
                raise ValueError(
                    f"{name} of {kind.__name__} takes {', '.join(parameters)}, not "
                    f"{', '.join(expected)}: its queries and keys before RoPE can't be seen; use "
                    "another model, or a method without calibration"
                )
            found[id(namespace), name] = namespace, name
    return list(found.values())


def rotates_apart(rotate: Callable[..., Any]) -> bool:
    """Whether a rotation takes queries or keys, ``x, cos, sin``, not both at once (Gemma-4)."""
    return list(rotation_signature(rotate).parameters)[:3] == _SINGLE_PARAMETERS


def rotation_signature(rotate: Callable[..., Any]) -> inspect.Signature:
    """What a function that rotates takes.

    Beside the package kernels, older transformers (5.17) make a module of the function, which
    takes anything; its ``forward`` is the function.
    """
    inner = inspect.unwrap(rotate)
    return inspect.signature(inner.forward if isinstance(inner, nn.Module) else inner)


def _code(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward).__code__
