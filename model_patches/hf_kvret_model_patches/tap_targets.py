"""What a tap hangs on: a model's attention modules, and the functions that rotate for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_kvret_model_patches.rope_config import ROTATION, rotates_both

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def attention_layers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The modules of the text decoder that call a registered attention function, by layer number.

    They are known by their code, not by their names.

    Raises:
        ValueError: there are none, or two have the same number.
    """
    layers: dict[int, nn.Module] = {}
    for module in model.get_decoder().modules():
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


def rotations(model: PreTrainedModel, modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The globals of the modeling modules in which ``modules`` look their rotation up.

    Each dictionary has ``apply_rotary_pos_emb``, of ``q, k, cos, sin`` or of ``x, cos, sin``. The
    list is empty for models without RoPE.

    Raises:
        ValueError: a module rotates by another function, or the configuration speaks of RoPE and
            the code doesn't.
    """
    text = model.config.get_text_config(decoder=True)
    found: dict[int, dict[str, Any]] = {}
    for kind, module in {type(module): module for module in modules}.items():
        namespace = inspect.unwrap(kind.forward).__globals__
        names = [
            name
            for name in _code(module).co_names
            if "rot" in name.lower() and callable(namespace.get(name))
        ]
        if not names and not getattr(text, "rope_parameters", None):
            continue
        if names != [ROTATION]:
            how = " and ".join(names) or "no function that we know"
            raise ValueError(
                f"{kind.__name__} rotates by {how}, not by {ROTATION} alone: its queries and keys "
                "before RoPE can't be seen; use another model, or a method without calibration"
            )
        try:
            rotates_both(namespace[ROTATION])
        except ValueError as error:
            raise ValueError(
                f"in {kind.__name__} {error}: its queries and keys before RoPE can't be seen; use "
                "another model, or a method without calibration"
            ) from error
        found[id(namespace)] = namespace
    return list(found.values())


def _code(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward).__code__
