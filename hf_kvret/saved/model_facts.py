"""Facts of a model that must agree where one uses what another one made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_kvret.models.compatibility import is_latent, layer_shapes, one_or_all

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_COUNTS = {
    "num_hidden_layers": "layers",
    "hidden_size": "numbers in a hidden state",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "KV heads",
    "head_dim": "numbers in a head",
    "vocab_size": "words in its vocabulary",
    "kv_lora_rank": "numbers in a latent",
    "qk_nope_head_dim": "numbers in a head without RoPE",
}
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "rope_interleave")


def model_facts(config: PreTrainedConfig) -> dict[str, Any]:
    """Facts that must agree between two models for one to use the other's artifact.

    Heads and widths of heads are lists with a number for each layer where layers differ.
    Plain JSON, the same in all supported versions of transformers, and the same for a text model
    alone and inside a multimodal one. Parameters that are None count as absent.

    Raises:
        TypeError: ``config`` is not a transformers configuration.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config is a {type(config).__name__}: pass model.config")
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or []
    shapes = layer_shapes(config)
    facts: dict[str, Any] = {
        "model_type": text.model_type,
        "num_hidden_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "num_attention_heads": one_or_all([shape.heads for shape in shapes]),
        "num_key_value_heads": one_or_all([shape.kv_heads for shape in shapes]),
        "head_dim": one_or_all([shape.head_dim for shape in shapes]),
        # Some versions list the kinds of layers where all have full attention, others don't.
        "layer_types": list(kinds) if set(kinds) - {"full_attention"} else None,
        "no_rope_layers": list(getattr(text, "no_rope_layers", None) or ()) or None,
        **_rope_facts(text),
        "vocab_size": text.vocab_size,
        # How a row is divided, what heads make of it, and in which order RoPE leaves its numbers.
        **({name: getattr(text, name, None) for name in _LATENT} if is_latent(config) else {}),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _rope_facts(text: PreTrainedConfig) -> dict[str, Any]:
    """RoPE parameters by dotted name, numbers as floats, defaults that not all versions write
    left out."""
    rope = getattr(text, "rope_parameters", None) or {}
    parts = {kind: part for kind, part in rope.items() if isinstance(part, Mapping)}
    parts[""] = {name: value for name, value in rope.items() if name not in parts}
    facts = {}
    for kind, part in sorted(parts.items()):
        prefix = f"rope.{kind}." if kind else "rope."
        for name, value in sorted(part.items()):
            default = name == "partial_rotary_factor" and value == 1
            # `type` is the old name of `rope_type`, which transformers always sets.
            if value is not None and name != "type" and not default:
                facts[prefix + name] = _plain(value)
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def facts_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The first fact in which a model (``ours``) is another one, in words; empty if none."""
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        if theirs.get(name) != ours.get(name):
            return _in_words(name, theirs.get(name), ours.get(name))
    return ""


def model_name(model: PreTrainedModel, name: str | None = None) -> str:
    """``name``, or where a model was loaded from, or its type; of a folder only the last part."""
    name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
    return Path(name).resolve().name if Path(name).exists() else name


def _in_words(name: str, theirs: Any, ours: Any) -> str:
    if name == "model_type":
        return f"made for a {_shown(theirs)} model, this one is {ours}"
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        place = next(i for i in range(len(ours)) if theirs[i] != ours[i])
        name, theirs, ours = f"{name}[{place}]", theirs[place], ours[place]
    if name in _COUNTS:
        return f"made for {_shown(theirs)} {_COUNTS[name]}, this model has {ours}"
    return f"made for {_shown(name)}={_shown(theirs)}, this model has {_shown(ours)}"


def _shown(value: Any) -> str:
    return "none" if value is None else printable(str(value)[:80])


def printable(text: str) -> str:
    """``text`` with what could command a terminal, or end the line, spelled out."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
