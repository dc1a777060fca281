"""Small random models of any type, with rows like those of its default configuration.

Layers, heads, experts, widths and vocabulary become few; what shapes a head stays: its dims, ranks
of latents, rotations, norms, biases.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_kvret.lab.coverage.unusual import CHANGES
from hf_kvret.models.compatibility import by_layer, text_key
from hf_kvret.testing.tiny import PAD_TOKEN, spread_weights

VOCAB_SIZE = 256
"""Vocabulary of every small model; the lower half are marks of images, ends and the like."""

_SEED = 5
_MOST_LAYERS = 6
_MOST_KV_HEADS = 2
_MOST_GROUP = 2
_WINDOW = 32

# Names in configurations, by what becomes of them.
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth", "encoder_layers",
    "num_blocks", "resampler_depth", "aligner_num_add_layers",
)  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim_model_base")
_INNER = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim",
    "n_inner", "ffn_hidden_size", "expert_ffn_hidden_size", "dff", "intermediate_size_mlp",
    "prefix_dense_intermediate_size", "dense_intermediate_size", "shared_intermediate_size",
    "share_expert_dim", "moe_shared_expert_intermediate_size", "block_ff_dim", "moe_hidden_size",
    "alignment_intermediate_size", "encoder_ffn_dim", "mlp_dim",
)  # fmt: skip
_SMALLER = {
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), _WINDOW),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    "q_lora_rank": 64,
    "zero_expert_num": 2,
    "vocab_size": VOCAB_SIZE,
}  # fmt: skip


def small_model(model_type: str, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """A random model: fp32, on the CPU, in eval mode, the same weights every time.

    Raises:
        Exception: of any kind, where a configuration of this type can't be made small like that.
    """
    config = small_config(AutoConfig.for_model(model_type))
    text = config.get_text_config(decoder=True)
    if not isinstance(config, model_class.config_class) and isinstance(
        text, model_class.config_class
    ):
        config = text
    return build(config, model_class)


def small_text_part(model_type: str, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """The text part of ``small_model`` as a model of its own.

    Raises:
        ValueError: it has no text part that transformers generates with alone; else as
            ``small_model``.
    """
    del model_class
    config = small_config(AutoConfig.for_model(model_type))
    text = config.get_text_config(decoder=True)
    if text is config:
        raise ValueError("there is none")
    return build(text, MODEL_FOR_CAUSAL_LM_MAPPING[type(text)])


def build(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    """A random model of ``config``: fp32, on the CPU, in eval mode, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class._from_config(config, dtype=torch.float32)
    spread_weights(model, _SEED)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD_TOKEN
    return model.eval()


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A configuration like ``config``, with few of everything.

    Raises:
        Exception: as ``small_model``.
    """
    text = config.get_text_config(decoder=True)
    settings = config.to_diff_dict()
    if text is config:
        _shrink_text(settings, text)
    else:
        _shrink_text(settings[text_key(config)], text)
        _shrink_parts(settings, text_key(config))
    _lower_marks(settings)
    _update(settings, CHANGES.get(config.model_type, {}))
    settings.pop("transformers_version", None)
    settings.pop("model_type", None)
    return type(config).from_dict(settings)


def _shrink_text(settings: dict[str, Any], text: PreTrainedConfig) -> None:
    for name, value in list(settings.items()):
        if isinstance(value, dict):
            settings[name] = {k: _less(k, v) for k, v in value.items()}
        else:
            settings[name] = _less(name, value)
    heads = next((_count(text, name) for name in _HEADS if _count(text, name)), 0)
    kv_heads = _count(text, "num_key_value_heads") or heads
    few = min(kv_heads, _MOST_KV_HEADS)
    group = min(heads // max(kv_heads, 1), _MOST_GROUP)
    hidden = next((_count(text, name) for name in _HIDDEN if _count(text, name)), 0)
    dim = _count(text, "head_dim") or hidden // max(heads, 1)
    for names, size in (
        (_HEADS, few * group),
        (("num_key_value_heads", "kv_n_heads"), few),
        (_HIDDEN, few * group * dim),
    ):
        for name in names:
            if isinstance(settings.get(name), int):
                settings[name] = size
    _keep_layers(settings, text)
    settings |= {"tie_word_embeddings": False}


def _keep_layers(settings: dict[str, Any], text: PreTrainedConfig) -> None:
    """Keep one layer of each kind, and the last of full attention."""
    count = next((getattr(text, name) for name in _LAYERS if _count(text, name)), 0)
    lists = {
        name: value
        for name, value in settings.items()
        if isinstance(value, list) and len(value) == count
    }
    kinds = [tuple(map(str, kind)) for kind in zip(*lists.values(), strict=True)] or [()] * count
    first = {kind: at for at, kind in reversed(list(enumerate(kinds)))}
    kept = sorted({*list(first.values())[-_MOST_LAYERS:], count - 1, count - 2})
    for name, value in lists.items():
        settings[name] = [value[at] for at in kept]
    own = {int(at): one for at, one in (settings.get("per_layer_config") or {}).items()}
    if own:
        settings["per_layer_config"] = {new: own[at] for new, at in enumerate(kept) if at in own}
    for name in _LAYERS:
        if isinstance(settings.get(name), int):
            settings[name] = len(kept)


def _shrink_parts(settings: dict[str, Any], but: str = "") -> None:
    """Towers for images and sounds, which prompts of text never call: two layers each."""
    for name, part in settings.items():
        if not isinstance(part, dict) or name == but:
            continue
        counts = {part[own] for own in _LAYERS if isinstance(part.get(own), int)}
        for own, value in part.items():
            if own in _LAYERS and isinstance(value, int):
                part[own] = min(value, 2)
            elif own in _INNER and isinstance(value, int):
                part[own] = min(value, _SMALLER[own])
            elif isinstance(value, list) and len(value) in counts:
                part[own] = value[:2]
            elif isinstance(value, list) and "index" in str(own):
                part[own] = [0, 1][: len(value)]
        _shrink_parts(part)


def _lower_marks(settings: dict[str, Any]) -> None:
    """Ids of special tokens, into the lower half of the vocabulary, each its own."""
    ids: dict[int, int] = {}

    def low(value: Any) -> Any:
        if isinstance(value, list):
            return [low(one) for one in value]
        return ids.setdefault(value, len(ids) + 3) if isinstance(value, int) else value

    def walk(part: dict[str, Any]) -> None:
        for name, value in part.items():
            if not isinstance(name, str):
                continue
            if isinstance(value, dict):
                walk(value)
            elif name == "pad_token_id":
                part[name] = None if value is None else PAD_TOKEN
            elif name.endswith(("_token_id", "_token_index", "_token_ids", "_id")):
                part[name] = low(value)

    walk(settings)


def _less(name: str, value: Any) -> Any:
    if isinstance(value, bool) or name not in _SMALLER:
        return value
    if isinstance(value, list):
        return [_less(name, one) for one in value]
    return min(value, _SMALLER[name]) if isinstance(value, int) else value


def _count(config: PreTrainedConfig, name: str) -> int:
    value = by_layer(config, name)[0]
    return value if isinstance(value, int) else 0


def _update(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            _update(settings[name], value)
        else:
            settings[name] = value
