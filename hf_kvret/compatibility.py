"""Which models a retrieval cache can serve, and the reason where it can't."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

_CHANGES_AFTER_CACHE = {
    "diffllama": "splits its values after the cache and attends to them in halves",
    "jetmoe": "repeats its keys after the cache, where no handle survives",
    "minimax_m3_vl": "has an indexer of its own beside the cache",
}


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the configuration alone shows to be impossible.

    Raises:
        ValueError: encoder-decoders, latent attention (MLA), models without a full-attention
            layer; the message says why and what to use instead.
    """
    text = config.get_text_config(decoder=True)
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder: its cache also holds cross-attention, which retrieval "
            "does not serve; use cache_implementation='dynamic'"
        )
    if getattr(text, "kv_lora_rank", None):
        raise ValueError(
            f"{name} uses multi-head latent attention (kv_lora_rank={text.kv_lora_rank}): it "
            "expands the cached latents after the cache, where no handle survives; use "
            "cache_implementation='dynamic'"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{name} shares keys and values between layers (num_kv_shared_layers="
            f"{text.num_kv_shared_layers}) and cuts their masks by query: not supported yet; use "
            "cache_implementation='dynamic'"
        )
    if text.model_type in _CHANGES_AFTER_CACHE:
        raise ValueError(
            f"{name} {_CHANGES_AFTER_CACHE[text.model_type]}: use cache_implementation='dynamic'"
        )
    if not any(type(layer) is DynamicLayer for layer in model_layers(config)):
        raise ValueError(
            f"{name} has no full-attention layer that a cache could retrieve for (all slide, are "
            "chunked, linear or recurrent): its own cache is already small; use "
            "cache_implementation='dynamic'"
        )


def check_model(model: PreTrainedModel) -> None:
    """``check_config``, and that the model's attention can be switched at all.

    Raises:
        ValueError: as ``check_config``; models with an attention of their own (Falcon, Bloom),
            without a transformers cache (Mamba), or that are not generative.
    """
    check_config(model.config)
    name = type(model).__name__
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    supports_cache = getattr(model, "_supports_default_dynamic_cache", None)
    if supports_cache is not None and not supports_cache():
        raise ValueError(f"{name} keeps its own kind of cache: use it without cache_implementation")
    for part in {type(model), type(decoder)}:
        if issubclass(part, PreTrainedModel) and not part._can_set_attn_implementation():
            raise ValueError(
                f"{name} computes attention by itself and ignores transformers' attention "
                "functions, so a retrieval cache would never be asked: use "
                "cache_implementation='dynamic'"
            )


def model_shape(config: PreTrainedConfig) -> dict[str, Any]:
    """What must be equal for one model to go on with another's cache: kind, heads and widths."""
    text = config.get_text_config(decoder=True)
    names = ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {name: getattr(text, name, None) for name in names}


def head_dim(config: PreTrainedConfig) -> int:
    """Numbers of a key in one head."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def model_layers(config: PreTrainedConfig) -> list:
    """The cache layers that transformers itself would give this model."""
    return DynamicCache(config=config).layers


def retrieval_layers(config: PreTrainedConfig) -> list[int]:
    """Numbers of the layers that retrieve: those whose attention is full."""
    kinds = enumerate(model_layers(config))
    return [number for number, layer in kinds if type(layer) is DynamicLayer]
