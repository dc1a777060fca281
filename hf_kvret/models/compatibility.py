"""Which models a retrieval cache can serve, and the reason where it can't."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)

from hf_kvret.options.config import RetrievalConfig
from hf_kvret_model_patches.decoders import decoder_of
from hf_kvret_model_patches.rope import layer_config

# By model type, why a retrieval cache can't serve it where configuration and classes do not say it.
_OBSTACLES = {
    "blt": "splits its text into patches and keeps several caches",
    "diffusion_gemma": "writes blocks of text by diffusion, in which tokens see those after them",
    "deepseek_v4": "merges the keys and values of several tokens into entries of its own",
    "diffllama": "splits its values after the cache and attends to them in halves",
    "doge": "builds a mask of its own on top of the causal one, from the values of all tokens",
    "dory": "adds copies of its layers to the cache while it runs, one for each of its loops",
    "evolla": "reads all tokens anew at every step, those that its cache holds included",
    "gemma4_assistant": "drafts for another model, whose cache it reads",
    "gemma4_unified_assistant": "drafts for another model, whose cache it reads",
    "git": "computes attention by itself, whatever implementation is set",
    **dict.fromkeys(
        (
            *("inkling_mm_model", "inkling_text", "inkling2", "inkling2_text"),
            *("inkling2_loop", "inkling2_loop_text"),
        ),
        "adds a learned bias to the scores of the tokens near by",
    ),
    "jetmoe": "repeats its keys after the cache, where no handle survives",
    "kosmos-2": "hands masks of its own making, of four dimensions, to its attention",
    "mllama": "keeps the keys of images in layers of the same cache (cross-attention)",
    "mllama_text_model": "keeps the keys of images in layers of the same cache (cross-attention)",
    **dict.fromkeys(
        ("qwen2_5_omni", "qwen3_omni_moe"),
        "is several models, of which model.thinker writes text and is served (generate with it)",
    ),
    "pi0": "generates actions, not text, and hands its cache to a second model",
    "rwkv": "is recurrent: it keeps a state, no keys and values",
    "unlimited_ocr": "slides over its text around reference tokens, in layers of its own kind",
    "xlstm": "is recurrent: it keeps a state, no keys and values",
}

# Models of latent attention whose own indexer names tokens to the attention function.
_INDEXED_LATENT = (
    *("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "hy_v4_vl_text", "dots3_note_text"),
    *("mistral_large4_text", "glm5_next_text"),
)
# By text model, the most tokens that its own indexer names for a query.
_INDEX_BUDGETS: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(_INDEXED_LATENT, lambda text: text.index_topk),
    "glm5_next_text": lambda text: (
        text.index_topk + text.index_kpool_always_select_tail * (text.index_kpool - 1)
    ),
    # The block at the end is not complete, and always named.
    "qwen4_exp_text": lambda text: (
        (text.indexer_budget or 0) and text.indexer_budget + text.indexer_compress_ratio - 1
    ),
    "minimax_m3_vl_text": lambda text: text.index_topk_blocks * text.index_block_size,
}
# Models of multi-head latent attention whose cache holds latents and rotated keys.
_LATENT = {
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "mistral4", "minicpm3"),
    *("youtu", "axk1", "kimi_linear", "bailing_hybrid", "sarvam_mla", *_INDEXED_LATENT),
}
# Cache layers of full attention; one has a linear state, too.
_FULL = {DynamicLayer, LinearAttentionAndFullAttentionLayer}
_OWN_CACHE = "use cache_implementation='dynamic' or leave it out"


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the configuration alone shows to be impossible.

    Raises:
        TypeError: no configuration of a model.
        ValueError: encoder-decoders, encoders, latent attention (MLA) of some types, models
            without a full-attention layer of its own; the message says why and what to use instead.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config must be the model's config, got {type(config).__name__}")
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
    if encodes(text):
        raise ValueError(
            f"{name} with is_decoder=False attends to both sides and keeps no cache: load it with "
            "config.is_decoder=True to generate with it"
        )
    if getattr(text, "use_bidirectional_attention", None) == "all":
        raise ValueError(
            f"{name} with use_bidirectional_attention='all' attends to both sides, so a token's "
            f"key changes with those after it: {_OWN_CACHE}"
        )
    ranks = [rank for rank in by_layer(text, "kv_lora_rank") if rank]
    if ranks and text.model_type not in _LATENT:
        raise ValueError(
            f"{name} has latent attention (kv_lora_rank={ranks[0]}) of a kind that retrieval does "
            f"not serve; {_OWN_CACHE}"
        )
    _check_layers(config)


def _check_layers(config: PreTrainedConfig) -> None:
    """ValueError unless some layer has full attention that a cache can serve."""
    layers, name = model_layers(config), config.model_type
    if any(map(is_indexed, layers)) and not _named_tokens(config):
        raise ValueError(
            f"{name} has an indexer of its own, of a kind that retrieval does not follow: "
            f"{_OWN_CACHE}"
        )
    text = config.get_text_config(decoder=True)
    if "reuse_but_indexer" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise ValueError(
            f"{name} has layers that read another's keys and choose of them by an indexer of their "
            f"own, for which there is no layer of a cache: {_OWN_CACHE}"
        )
    if any(map(_is_full, layers)):
        return
    raise ValueError(
        f"{name} has no full-attention layer that a cache could retrieve for (all slide, are "
        f"chunked, linear or recurrent): its own cache is already small; {_OWN_CACHE}"
    )


def check_model(model: PreTrainedModel) -> None:
    """``check_config``, and check that the model's attention can be switched.

    Raises:
        ValueError: as ``check_config``, ``text_key`` and ``check_class``; shared keys on several
            devices.
    """
    check_config(model.config)
    if model.config.get_text_config(decoder=True) is not model.config:
        text_key(model.config)
    check_class(type(model), type(decoder_of(model)))
    devices = {str(one.device) for one in decoder_of(model).parameters()}
    if reader_count(model.config) and len(devices) > 1:
        raise ValueError(
            f"{type(model).__name__} has layers that read another's keys, and lies on "
            f"{', '.join(sorted(devices))}, between which these lose their cache: put it on one "
            f"device, or {_OWN_CACHE}"
        )


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
    parts: set[Any] = {model_class, decoder_class or model_class}
    for part in parts:
        if not issubclass(part, PreTrainedModel) or part._can_set_attn_implementation():
            continue
        raise ValueError(
            f"{name} computes attention by itself and ignores transformers' attention functions, "
            f"so a retrieval cache would never be called: {_OWN_CACHE} (where {part.__name__} was "
            "made in a notebook, put it into a .py file: transformers reads the source)"
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
    """Type, heads and widths: equal in models that can use each other's saved caches.

    A list with a value for each layer where layers differ.
    """
    text = config.get_text_config(decoder=True)
    names = ["model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    if is_latent(config):
        names += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    return {name: one_or_all(by_layer(text, name)) for name in names}


def is_latent(config: PreTrainedConfig) -> bool:
    """Whether full attention is multi-head latent attention, of a ``config`` that passes."""
    return config.get_text_config(decoder=True).model_type in _LATENT


class AttentionShape(NamedTuple):
    """Heads of one layer, and elements of a key that its cache holds.

    Attributes:
        rank: elements of a latent, which is also its row's value; 0: attention is not latent.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rank: int = 0

    @property
    def width(self) -> int:
        """Numbers in the keys of a token."""
        return self.kv_heads * self.head_dim

    def held_by(self, ranks: int) -> AttentionShape:
        """What each of ``ranks`` processes holds: a part of the heads, or all latent rows."""
        kv_heads = self.kv_heads if self.rank else self.kv_heads // ranks
        return self._replace(heads=self.heads // ranks, kv_heads=kv_heads)


def layer_shape(config: PreTrainedConfig, layer: int) -> AttentionShape:
    """Shape of the model's layer number ``layer``, for a ``config`` that passes ``check_config``.

    A latent layer holds one row for all heads.
    """
    text = layer_config(config, layer)
    heads = text.num_attention_heads
    if is_latent(config):
        ropes = getattr(text, "no_rope_layers", None)
        rope_dim = text.qk_rope_head_dim if ropes is None or ropes[layer] else 0
        return AttentionShape(heads, 1, text.kv_lora_rank + rope_dim, text.kv_lora_rank)
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return AttentionShape(heads, getattr(text, "num_key_value_heads", None) or heads, dim)


def layer_shapes(config: PreTrainedConfig) -> list[AttentionShape]:
    """``layer_shape`` of every layer."""
    count = config.get_text_config(decoder=True).num_hidden_layers
    return [layer_shape(config, layer) for layer in range(count)]


def retrieval_shapes(config: PreTrainedConfig) -> dict[int, AttentionShape]:
    """Shape by number of the layers that retrieve, for a ``config`` that passes."""
    return {number: layer_shape(config, number) for number in retrieval_layers(config)}


def head_dims(config: PreTrainedConfig) -> list[int]:
    """Head dims of the keys that layers hold for retrieval, each once, largest first."""
    return sorted({shape.head_dim for shape in retrieval_shapes(config).values()}, reverse=True)


def model_layers(config: PreTrainedConfig) -> list:
    """The cache layers that transformers itself would give this model.

    Raises:
        ValueError: a configuration that transformers can't make its standard cache from.
    """
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds <= DYNAMIC_LAYER_TYPE_MAPPING.keys():
        # A model's own kind of layer is known once the file with its model was imported.
        with suppress(ImportError):
            import_module(type(text).__module__.replace(".configuration_", ".modeling_"))
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
    return [number for number, layer in enumerate(model_layers(config)) if _is_full(layer)]


def _is_full(layer: Any) -> bool:
    return type(layer) in _FULL or is_indexed(layer)


def is_indexed(layer: Any) -> bool:
    """Whether a cache layer of transformers holds the keys of a model's own indexer, too."""
    return hasattr(layer, "update_indexer") or hasattr(layer, "update_index")


def index_budget(config: PreTrainedConfig) -> int:
    """Most tokens that the model's own indexer names for a query; 0: it has none that we serve."""
    named = _named_tokens(config)
    # A type's layers may all have full attention.
    return named if named and any(map(is_indexed, model_layers(config))) else 0


def _named_tokens(config: PreTrainedConfig) -> int:
    """``index_budget`` of a model that has layers with an indexer."""
    text = config.get_text_config(decoder=True)
    return _INDEX_BUDGETS.get(text.model_type, lambda text: 0)(text)


def reader_count(config: PreTrainedConfig) -> int:
    """How many layers of full attention read another layer's keys and values (Gemma-3n)."""
    text = config.get_text_config(decoder=True)
    if shared := getattr(text, "num_kv_shared_layers", 0):
        return text.layer_types[-shared:].count("full_attention")
    return (getattr(text, "kv_sharing_modes", None) or []).count("reuse")


def encodes(text: PreTrainedConfig) -> bool:
    """Whether this is an encoder that could decode, with is_decoder=False (BERT)."""
    return hasattr(text, "add_cross_attention") and getattr(text, "is_decoder", True) is False


def by_layer(text: PreTrainedConfig, name: str) -> list:
    """``name`` in each layer of a text model's configuration; one value where layers are alike.

    In some configurations (Gemma-4) layers differ, and asking for the value of all raises.
    """
    differ = getattr(text, "is_heterogeneous", False)
    layers = text.per_layer_config if differ else [text]
    return [getattr(layer, name, None) for layer in layers]


def one_or_all(values: list) -> Any:
    """The value that all layers have, or the list where they differ."""
    return values[0] if all(value == values[0] for value in values) else values


def check_options(options: RetrievalConfig, config: PreTrainedConfig, owner: str) -> None:
    """ValueError for options of a cache of class ``owner`` that don't fit a model."""
    for dim in head_dims(config):
        options.check_head_dim(dim)
    for rank in {shape.rank for shape in retrieval_shapes(config).values()} - {0}:
        RetrievalConfig.check_head_dim(options, rank)
    if options.follows_model and not index_budget(config):
        raise ValueError(
            f"{config.model_type} has no indexer of its own that native can follow: take "
            "another method, as cache_implementation='paris'"
        )
    if index_budget(config) and not options.follows_model:
        raise ValueError(
            f"{config.model_type} selects by an indexer of its own: take "
            "cache_implementation='native'"
        )
    readers = reader_count(config)
    if readers and options.learns_from_queries:
        raise ValueError(
            f"{readers} layers of {config.model_type} read the keys of another layer with "
            f"queries of their own, and {owner} learns from the queries of one layer: "
            "take cache_implementation='paris', or flat, a2ats or aqua"
        )
    if readers and options.select_every > 1:
        raise ValueError(
            f"select_every={options.select_every}: {readers} layers of {config.model_type} read "
            "the keys of another layer, and select for queries of their own; take select_every=1"
        )
