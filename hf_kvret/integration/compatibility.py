"""Which models a retrieval cache can serve, and the reason where it can't."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# By model type, why a retrieval cache can't serve it where configuration and classes do not tell.
_OBSTACLES = {
    "blt": "splits its text into patches and keeps several caches",
    "deepseek_v4": "merges the keys and values of several tokens into entries of its own",
    "diffllama": "splits its values after the cache and attends to them in halves",
    "doge": "builds a mask of its own on top of the causal one, from the values of all tokens",
    "gemma4_assistant": "drafts for another model, whose cache it reads",
    "gemma4_unified_assistant": "drafts for another model, whose cache it reads",
    "git": "computes attention by itself, whatever implementation is set",
    "jetmoe": "repeats its keys after the cache, where no handle survives",
    "minimax_m3_vl": "chooses blocks of tokens with an indexer of its own beside the cache",
    "minimax_m3_vl_text": "chooses blocks of tokens with an indexer of its own beside the cache",
    "mllama": "keeps the keys of images in layers of the same cache (cross-attention)",
    "mllama_text_model": "keeps the keys of images in layers of the same cache (cross-attention)",
    "pi0": "generates actions, not text, and hands its cache to a second model",
    "rwkv": "is recurrent: it keeps a state, no keys and values",
    "unlimited_ocr": "slides over its text around reference tokens, in layers of its own kind",
    "xlstm": "is recurrent: it keeps a state, no keys and values",
}

# Models of multi-head latent attention whose cache holds latents and rotated keys.
_LATENT = {
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "mistral4", "minicpm3"),
    *("youtu", "axk1", "kimi_linear", "bailing_hybrid"),
}

# What all attention layers must agree on.
_SHAPE = ("head_dim", "num_attention_heads", "num_key_value_heads")

# Decoders although their configuration says is_decoder=False.
_ALWAYS_DECODE = {"evolla"}

_OWN_CACHE = "use cache_implementation='dynamic' or leave it out"


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the configuration alone shows to be impossible.

    Raises:
        ValueError: encoder-decoders, encoders, latent attention (MLA), heads that differ between
            layers, models without a full-attention layer of its own; the message says why and what
            to use instead.
    """
    text = config.get_text_config(decoder=True)
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder: its cache also holds cross-attention, which retrieval "
            f"does not serve; {_OWN_CACHE}"
        )
    obstacle = _OBSTACLES.get(name) or _OBSTACLES.get(text.model_type)
    if obstacle is not None:
        raise ValueError(f"{name} {obstacle}: {_OWN_CACHE}")
    if _encodes(text):
        raise ValueError(
            f"{name} with is_decoder=False attends to both sides and keeps no cache: load it with "
            "config.is_decoder=True to generate with it"
        )
    ranks = [rank for rank in _layer_values(text, "kv_lora_rank") if rank]
    if ranks and text.model_type not in _LATENT:
        raise ValueError(
            f"{name} has latent attention (kv_lora_rank={ranks[0]}) of a kind that retrieval does "
            f"not serve, as where an indexer of the model chooses tokens; {_OWN_CACHE}"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{name} shares keys and values between layers (num_kv_shared_layers="
            f"{text.num_kv_shared_layers}) and cuts their masks by query: not supported yet; "
            f"{_OWN_CACHE}"
        )
    for setting in _SHAPE:
        values = _layer_values(text, setting)
        if len(values) > 1:
            raise ValueError(
                f"{name} has layers of different {setting} ({', '.join(map(str, values))}): not "
                f"supported yet; {_OWN_CACHE}"
            )
    _check_layers(config)


def _check_layers(config: PreTrainedConfig) -> None:
    """ValueError unless some layer's cache holds full attention and nothing else."""
    kinds = [type(layer) for layer in model_layers(config)]
    if DynamicLayer in kinds:
        return
    name = config.model_type
    hybrids = [kind for kind in kinds if issubclass(kind, DynamicLayer) and _whole(kind)]
    if hybrids:
        raise ValueError(
            f"{name} keeps full attention and something else in one cache layer "
            f"({hybrids[0].__name__}, {len(hybrids)} of {len(kinds)} layers): not supported yet; "
            f"{_OWN_CACHE}"
        )
    raise ValueError(
        f"{name} has no full-attention layer that a cache could retrieve for (all slide, are "
        f"chunked, linear or recurrent): its own cache is already small; {_OWN_CACHE}"
    )


def check_model(model: PreTrainedModel) -> None:
    """``check_config``, and check that the model's attention can be switched.

    Raises:
        ValueError: as ``check_config``, ``text_key`` and ``check_class``.
    """
    check_config(model.config)
    if model.config.get_text_config(decoder=True) is not model.config:
        text_key(model.config)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    check_class(type(model), type(decoder))


def check_class(model_class: type, decoder_class: type | None = None) -> None:
    """Refuse what the classes of a model and of its decoder show to be impossible.

    Raises:
        ValueError: models with an attention of their own (Falcon, Bloom), or without a
            transformers cache (Mamba).
    """
    name = model_class.__name__
    supports_cache = getattr(model_class, "_supports_default_dynamic_cache", None)
    if supports_cache is not None and not supports_cache():
        raise ValueError(f"{name} keeps its own kind of cache: use it without cache_implementation")
    for part in {model_class, decoder_class or model_class}:
        if issubclass(part, PreTrainedModel) and not _switches(part):
            raise ValueError(
                f"{name} computes attention by itself and ignores transformers' attention "
                f"functions, so a retrieval cache would never be called: {_OWN_CACHE}"
            )


def text_key(config: PreTrainedConfig) -> str:
    """The key under which a composite ``config`` has its text model's configuration.

    Raises:
        ValueError: it is nested deeper than one level.
    """
    text = config.get_text_config(decoder=True)
    for key in config.sub_configs:
        if getattr(config, key, None) is text:
            return key
    raise ValueError(
        f"{config.model_type}: its text model's configuration is nested too deep to be switched; "
        "load the text model alone"
    )


def model_shape(config: PreTrainedConfig) -> dict[str, Any]:
    """Type, heads and widths: equal in models that can use each other's saved caches."""
    text = config.get_text_config(decoder=True)
    names = ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {name: _layer_values(text, name)[0] for name in names}


def is_latent(config: PreTrainedConfig) -> bool:
    """Whether full attention is multi-head latent attention, of a ``config`` that passes."""
    return config.get_text_config(decoder=True).model_type in _LATENT


def latent_rank(config: PreTrainedConfig) -> int:
    """Numbers of a latent, which are also its row's value; 0 where attention is not latent."""
    text = config.get_text_config(decoder=True)
    return text.kv_lora_rank if is_latent(config) else 0


def head_dim(config: PreTrainedConfig) -> int:
    """Head dim of the keys that are held, for a ``config`` that passes ``check_config``."""
    text = config.get_text_config(decoder=True)
    if is_latent(config):
        return text.kv_lora_rank + text.qk_rope_head_dim
    return _layer_values(text, "head_dim")[0] or text.hidden_size // text.num_attention_heads


def model_layers(config: PreTrainedConfig) -> list:
    """The cache layers that transformers itself would give this model.

    Raises:
        ValueError: a configuration that transformers can't make its standard cache from.
    """
    try:
        return DynamicCache(config=config).layers
    except (AttributeError, KeyError) as error:
        raise ValueError(
            f"transformers can't make its standard cache from a configuration of "
            f"{config.model_type} ({type(error).__name__}: {error}), so the model keeps a cache of "
            "its own: use it without cache_implementation"
        ) from error


def retrieval_layers(config: PreTrainedConfig) -> list[int]:
    """Numbers of the layers that retrieve: those whose attention is full."""
    kinds = enumerate(model_layers(config))
    return [number for number, layer in kinds if type(layer) is DynamicLayer]


def _encodes(text: PreTrainedConfig) -> bool:
    """Whether this is an encoder that could decode, with is_decoder=False (BERT)."""
    tells = hasattr(text, "add_cross_attention") and text.model_type not in _ALWAYS_DECODE
    return tells and getattr(text, "is_decoder", True) is False


def _switches(model_class: type[PreTrainedModel]) -> bool:
    """Whether models of this class ask transformers for their attention function."""
    return bool(model_class._can_set_attn_implementation())


def _whole(kind: type) -> bool:
    """Whether a cache layer of this kind keeps all tokens."""
    return not getattr(kind, "is_sliding", False)


def _layer_values(config: PreTrainedConfig, name: str) -> list:
    """The distinct values of ``name`` in the layers of ``config``: one for most models.

    In some configurations (Gemma-4) layers differ, and transformers has no value for all of them.
    """
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values: list[Any] = []
    for layer in layers:
        value = getattr(layer, name, None)
        if value not in values:
            values.append(value)
    return values
