"""Every type that generates text: served or refused, by its default configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.auto import modeling_auto

from hf_kvret.attention.prompt_chunks import recurs
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.methods.flat import FlatKVCache
from hf_kvret.methods.native import NativeKVCache
from hf_kvret.models.compatibility import (
    by_layer,
    check_class,
    check_config,
    encodes,
    head_dims,
    index_budget,
    is_latent,
    retrieval_layers,
    text_key,
)
from hf_kvret.models.exact_chunks import why_whole
from hf_kvret.replay.replayable import untested_type
from hf_kvret.testing.conformance import ALL_MODELS

# From the most to the least particular: a type may be in several.
_MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")

_QWEN4_INDEXER: dict[str, Any] = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128},
    **{"indexer_budget": 2048, "indexer_compress_ratio": 4},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "mrope_section": [11, 11, 10],
    },
}
# By type, what its default configuration lacks.
_LACKING: dict[str, dict[str, Any]] = {
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "qwen4_exp_text": _QWEN4_INDEXER,
}

# Names of key and value heads in configurations; without any of them every head has its own.
_KV_HEADS = ("num_key_value_heads", "kv_n_heads")


@dataclass(frozen=True)
class ModelType:
    """One type, by a configuration of it.

    Attributes:
        name: in transformers' mappings.
        text_type: type of its text part; its own where it has no parts.
        refusal: the library's error; empty for a type that is served.
        untold: why transformers has no default configuration; empty where it has one.
        layers: counts of its cache layers: ``full`` ones retrieve, others are ``sliding``,
            ``recurrent`` or ``other``. None where it is refused.
        latent: whether full layers hold latents (MLA).
        kv_heads: heads of the rows that full layers hold; 1 where all queries share latents.
        key_dim: elements of a key.
        replay: whether decode steps may be replayed from a CUDA graph.
        chunks: whether ``prefill_chunk="auto"`` may cut its prompts.
        conformance: whether a small model of it is in the conformance suite.
        changed: what its default configuration lacks to generate text; empty for most.
    """

    name: str
    text_type: str
    refusal: str = ""
    untold: str = ""
    layers: dict[str, int] | None = None
    latent: bool = False
    kv_heads: int = 0
    key_dim: int = 0
    replay: bool = False
    chunks: bool = False
    conformance: bool = False
    changed: str = ""

    @property
    def served(self) -> bool:
        """Whether nothing is known against it."""
        return not (self.refusal or self.untold)


def scan() -> list[ModelType]:
    """``default_type`` of all ``type_names``; takes seconds, as all their modules are imported."""
    return [default_type(name) for name in type_names()]


def type_names() -> list[str]:
    """All types of transformers that generate text, in the order of the alphabet."""
    return sorted(_class_names())


def default_config(name: str) -> tuple[PreTrainedConfig, str]:
    """The default configuration of a type, changed so that it can generate text, and how.

    ``""`` where nothing had to be changed.
    """
    if name in _LACKING:
        return AutoConfig.for_model(name, **_LACKING[name]), "with its indexer"
    config = AutoConfig.for_model(name)
    if encodes(config.get_text_config(decoder=True)):
        return AutoConfig.for_model(name, is_decoder=True), "`is_decoder=True`"
    return config, ""


@cache
def default_type(name: str) -> ModelType:
    """One type of transformers, by its default configuration.

    Raises:
        ValueError: no type that generates text; the message has similar names.
    """
    _check_name(name)
    try:
        config, changed = default_config(name)
    except (ValueError, TypeError, StrictDataclassError) as error:
        return ModelType(name, name, untold=" ".join(str(error.__cause__ or error).split()))
    # Some share the configuration of another type, whose name it has.
    return replace(configured_type(config, partial(text_class, name)), name=name, changed=changed)


def configured_type(
    config: PreTrainedConfig, find_class: Callable[[], type[PreTrainedModel]] | None = None
) -> ModelType:
    """The type of models with ``config``: served, or refused.

    ``find_class`` returns their class, which takes long to import: it is only called where nothing
    else is against them.
    """
    text = config.get_text_config(decoder=True)
    name, types = config.model_type, {config.model_type, text.model_type}
    conformance = name in _conformance_types()
    try:
        check_config(config)
        if text is not config:
            text_key(config)
        empty = (NativeKVCache if index_budget(config) else FlatKVCache)(config)
        if find_class is not None:
            check_class(find_class())
    except ValueError as error:
        return ModelType(name, text.model_type, refusal=str(error), conformance=conformance)
    return ModelType(
        name,
        text.model_type,
        layers=dict(Counter(map(_layer_name, empty.layers))),
        latent=is_latent(config),
        kv_heads=kv_heads(config),
        key_dim=head_dims(config)[0],
        replay=not any(map(untested_type, types)),
        chunks=not recurs(empty) and why_whole(config) is None,
        conformance=conformance,
    )


def kv_heads(config: PreTrainedConfig) -> int:
    """Heads of the rows that layers with full attention hold, for a config that is served.

    Where layers differ (Gemma-4), of the first of them that retrieves.
    """
    if is_latent(config):
        return 1
    text = config.get_text_config(decoder=True)
    if getattr(text, "multi_query", False):
        return 1
    first = retrieval_layers(config)[0]
    counts = [by_layer(text, name) for name in (*_KV_HEADS, "num_attention_heads")]
    of_first = (count[first] if len(count) > 1 else count[0] for count in counts)
    return next(count for count in of_first if count)


def text_class(name: str) -> type[PreTrainedModel]:
    """The class that generates text for a type: the one for its whole configuration, if any.

    Raises:
        ValueError: no type that generates text; the message has similar names.
    """
    _check_name(name)
    classes = [getattr(transformers, class_name) for class_name in _class_names()[name]]
    config_class = transformers.CONFIG_MAPPING[name]
    whole = (cls for cls in classes if issubclass(config_class, cls.config_class or ()))
    return next(whole, classes[0])


def _check_name(name: str) -> None:
    if name not in type_names():
        similar = [other for other in type_names() if name[:4].lower() in other]
        raise ValueError(
            f"{name!r} is no type of transformers {transformers.__version__} that generates text: "
            + (f"did you mean {', '.join(similar[:8])}?" if similar else "see hf-kvret models")
        )


@cache
def _class_names() -> dict[str, list[str]]:
    """Names of the classes that generate text, by type."""
    names: dict[str, list[str]] = {}
    for mapping in _MAPPINGS:
        named = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
        for model_type, classes in named.items():
            first = classes if isinstance(classes, str) else classes[0]
            names.setdefault(model_type, []).append(first)
    return names


@cache
def _conformance_types() -> frozenset[str]:
    types = set()
    for model in ALL_MODELS.values():
        # Older transformers lack some of them.
        with suppress(ValueError):
            types.add(model.config().model_type)
    return frozenset(types)


def _layer_name(layer: object) -> str:
    if isinstance(layer, RetrievalLayer):
        return "full"
    if getattr(layer, "is_sliding", False):
        return "sliding"
    return "recurrent" if isinstance(layer, LinearAttentionLayer) else "other"
