"""``hf-kvret models``: whether a model is served, and why others are refused."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from hf_kvret.artifacts.files import is_hub_id
from hf_kvret.generate.chunks import recurs
from hf_kvret.lab.program.program import example_lines
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.methods.flat import FlatKVCache
from hf_kvret.methods.native import NativeKVCache
from hf_kvret.models.compatibility import (
    check_class,
    check_config,
    encodes,
    index_budget,
    retrieval_shapes,
    text_key,
)
from hf_kvret.models.exact_chunks import why_whole
from hf_kvret.replay.replayable import untested_type
from hf_kvret.saved.identity import printable

# From the most to the least particular: a type may be in several.
_MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
_BF16_BYTES = 2

_QWEN4_INDEXER: dict[str, Any] = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128},
    **{"indexer_budget": 2048, "indexer_compress_ratio": 4},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "mrope_section": [11, 11, 10],
    },
}
# Types whose default configuration lacks something, with that.
_LACKING: dict[str, dict[str, Any]] = {
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "qwen4_exp_text": _QWEN4_INDEXER,
}


@dataclass(frozen=True)
class ModelType:
    """Models of one type, by a configuration.

    Attributes:
        name: in transformers' mappings.
        refusal: the error that a cache for it raises; empty for a type that is served.
        layers: counts of its cache layers: ``full`` ones retrieve, others are ``sliding``,
            ``recurrent`` or ``other``. Empty where it is refused, as all that follows.
        kv_heads: heads of the rows that the first full layer holds; 1 where all queries share
            latents.
        key_dim: elements of its key, or of its latent and rotated key.
        token_bytes: of a token's keys and values in all full layers, in bf16.
        replay: whether decode steps may be replayed from a CUDA graph.
        chunks: whether ``prefill_chunk="auto"`` may cut its prompts.
        changed: what its default configuration lacks to generate text; empty for most.
    """

    name: str
    refusal: str = ""
    layers: tuple[tuple[str, int], ...] = ()
    kv_heads: int = 0
    key_dim: int = 0
    token_bytes: int = 0
    replay: bool = False
    chunks: bool = False
    changed: str = ""

    @property
    def layer_counts(self) -> str:
        """``12 full, 36 sliding``."""
        return ", ".join(f"{count} {kind}" for kind, count in self.layers)


def add_models_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``models`` to the program's commands."""
    parser = commands.add_parser(
        "models",
        help="say which models are served, and why others are refused",
        description="Say whether a model is served, from its config.json alone. The page "
        "docs/models.md lists every type of transformers that generates text.",
        epilog=example_lines(["hf-kvret models gemma3", "hf-kvret models ./my-model"]),
    )
    parser.add_argument(
        "model", help="a type of transformers, a folder with config.json, or a hub id"
    )
    parser.set_defaults(run=lambda parsed: _run(parsed.model))


def _run(model: str) -> int:
    transformers_logging.set_verbosity_error()
    one = find_type(model)
    if one.refusal:
        facts = [f"type: {one.name}", f"refused: {one.refusal}"]
    else:
        facts = [
            f"type: {one.name}, served{one.changed and f' {one.changed}'}",
            f"layers: {one.layer_counts}; full ones retrieve",
            f"rows of a layer: {one.kv_heads} heads, {one.key_dim} numbers of a key",
            f"bytes a token: {one.token_bytes:,} in bf16",
            f"CUDA graph: {'replayed' if one.replay else 'steps are not replayed'}",
            f"prompt: {'may be' if one.chunks else 'is never'} cut by prefill_chunk='auto'",
        ]
    print("\n".join(map(printable, facts)))
    return 0


def find_type(model: str) -> ModelType:
    """The type of a model: the name of a type, a folder with a configuration, or a hub id.

    Raises:
        ValueError: no such type, or a configuration that transformers can't read.
        OSError: no such model, or the hub can't be reached.
    """
    path = Path(model)
    if model in CONFIG_MAPPING and not path.exists():
        return default_type(model)
    if not path.exists() and not ("/" in model and is_hub_id(model)):
        raise ValueError(
            f"this transformers does not know the type {model!r}, and it is "
            "no folder and no hub id (owner/name)"
        )
    try:
        config = AutoConfig.from_pretrained(model)
    except (StrictDataclassError, TypeError, KeyError, ArithmeticError) as error:
        raise ValueError(
            f"transformers can't read the configuration of {model!r} "
            f"({type(error).__name__}: {' '.join(str(error).split())}): correct its config.json"
        ) from error
    return configured_type(config, config.model_type)


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
    """One type of transformers, by its default configuration."""
    try:
        config, changed = default_config(name)
    except (ValueError, TypeError, StrictDataclassError) as error:
        why = " ".join(str(error.__cause__ or error).split())
        return ModelType(name, f"{name}: transformers can't make a default configuration: {why}")
    one = configured_type(config, name)
    if not one.refusal and name not in type_names():
        return ModelType(name, f"{name} generates no text in transformers")
    return replace(one, changed=changed)


def configured_type(config: PreTrainedConfig, name: str) -> ModelType:
    """Models with ``config``: served, or refused. Some types share the configuration of others."""
    text = config.get_text_config(decoder=True)
    try:
        check_config(config)
        if text is not config:
            text_key(config)
        empty = (NativeKVCache if index_budget(config) else FlatKVCache)(config)
        # Last, since the import of a class takes long.
        if name in type_names():
            check_class(text_class(name))
    except ValueError as error:
        return ModelType(name, refusal=str(error))
    shapes = [*retrieval_shapes(config).values()]
    # Latents stand for keys and values; elsewhere values may have sizes of their own.
    value_dim = getattr(text, "v_head_dim", None)
    numbers = sum(
        shape.width + (0 if shape.rank else shape.kv_heads * (value_dim or shape.head_dim))
        for shape in shapes
    )
    return ModelType(
        name,
        layers=tuple(Counter(map(_layer_kind, empty.layers)).items()),
        kv_heads=shapes[0].kv_heads,
        key_dim=max(shape.head_dim for shape in shapes),
        token_bytes=_BF16_BYTES * numbers,
        replay=not any(map(untested_type, (config.model_type, text.model_type))),
        chunks=not recurs(empty) and why_whole(config) is None,
    )


def _layer_kind(layer: object) -> str:
    if isinstance(layer, RetrievalLayer):
        return "full"
    if getattr(layer, "is_sliding", False):
        return "sliding"
    return "recurrent" if isinstance(layer, LinearAttentionLayer) else "other"


def text_class(name: str) -> type[PreTrainedModel]:
    """The class that generates text for one of ``type_names``, for its whole configuration."""
    classes = [getattr(transformers, class_name) for class_name in type_names()[name]]
    config_class = transformers.CONFIG_MAPPING[name]
    whole = (cls for cls in classes if issubclass(config_class, cls.config_class or ()))
    return next(whole, classes[0])


@cache
def type_names() -> dict[str, list[str]]:
    """All types of transformers that generate text, with the names of classes that do.

    They are in the order of the alphabet.
    """
    names: dict[str, list[str]] = {}
    for mapping in _MAPPINGS:
        named = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
        for model_type, classes in named.items():
            first = classes if isinstance(classes, str) else classes[0]
            names.setdefault(model_type, []).append(first)
    return dict(sorted(names.items()))
