"""Where the keys of ``bench index-build`` come from, as its options say."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hf_kvret.benchmark.index_build_keys import (
    RECENT,
    LayerKeys,
    LayerShape,
    model_layer,
    random_layer,
)
from hf_kvret.benchmark.limits import available_host_memory
from hf_kvret.compatibility import head_dim, model_layers
from hf_kvret.evaluation.arguments import DTYPES
from hf_kvret.evaluation.subject import Subject, load_subject
from hf_kvret.evaluation.texts import read_text, token_ids

DEFAULT_SHAPE = LayerShape(heads=8, group=4, dim=128)
_RANDOM_ONLY = ("heads", "group", "dim")
_MODEL_ONLY = ("model", "text", "layer")


class Source(ABC):
    """Keys and queries of one layer, made when they are asked for.

    Attributes:
        shape: sizes of the layer.
    """

    shape: LayerShape

    @abstractmethod
    def read(self, tokens: int) -> LayerKeys:
        """Of so many tokens."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What identifies them, for JSON."""


class RandomSource(Source):
    """Synthetic ones, see ``random_layer``."""

    def __init__(
        self, shape: LayerShape, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self.shape = shape
        self._rest = (dtype, device, seed)

    def read(self, tokens: int) -> LayerKeys:
        return random_layer(self.shape, tokens, *self._rest)

    def describe(self) -> dict[str, Any]:
        return {"keys": "random", **vars(self.shape)}


class ModelSource(Source):
    """Those of a model's layer while it reads the beginning of a text."""

    def __init__(self, subject: Subject, text: Path, layer: int | None, needed: int) -> None:
        """``layer`` None: the middle one.

        Raises:
            ValueError: a text of fewer than ``needed`` tokens, or a layer without full attention.
        """
        self._subject, self._text = subject, text
        ids = token_ids(subject.need_tokenizer("--keys model"), read_text(text))
        if len(ids) < needed:
            raise ValueError(
                f"--text {text} has {len(ids)} tokens, the longest --context, {RECENT} recent "
                f"ones and --queries take {needed}: give a longer text, or a shorter --context"
            )
        self._ids = ids
        config = subject.model.config.get_text_config(decoder=True)
        layers = model_layers(subject.model.config)
        full = [number for number, one in enumerate(layers) if type(one) is DynamicLayer]
        if layer is not None and layer not in full:
            raise ValueError(
                f"--layer {layer}: layers of full attention in {subject.name} are "
                f"{', '.join(map(str, full))}"
            )
        self._layer = full[len(full) // 2] if layer is None else layer
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self.shape = LayerShape(kv_heads, heads // kv_heads, head_dim(subject.model.config))

    def read(self, tokens: int) -> LayerKeys:
        dtype = self._subject.model.dtype
        return model_layer(self._subject, self._ids[:tokens], self._layer, dtype)

    def describe(self) -> dict[str, Any]:
        where = {"layer": self._layer, "text": self._text.name, "text_tokens": len(self._ids)}
        return {"keys": "model"} | self._subject.describe() | where | vars(self.shape)


def choose_source(options: argparse.Namespace) -> Source:
    """The keys that ``options`` ask for.

    Raises:
        ValueError: options of the other kind of keys, sizes below 1, no text or one that is too
            short, or a model that can't be loaded.
        FileNotFoundError: no such text.
    """
    model = options.keys == "model"
    for name in _RANDOM_ONLY if model else _MODEL_ONLY:
        if getattr(options, name) is not None:
            other = "random" if model else "model"
            raise ValueError(f"--{name} belongs to --keys {other}: leave one of them out")
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    if model:
        if options.text is None:
            raise ValueError("--keys model reads a text: give --text FILE")
        subject = load_subject(options.model or "reference", dtype, device)
        needed = max(options.context) + RECENT + options.queries
        return ModelSource(subject, options.text, options.layer, needed)
    sizes = {name: getattr(options, name) for name in _RANDOM_ONLY}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: at least 1")
    given = {name: value for name, value in sizes.items() if value is not None}
    return RandomSource(LayerShape(**{**vars(DEFAULT_SHAPE), **given}), dtype, device, options.seed)


def check_memory(shape: LayerShape, tokens: int, options: argparse.Namespace) -> None:
    """ValueError when host memory is short of what ``tokens`` take, as far as it can be foreseen.

    Keys and queries, on a CPU the store and its copy while it is filled; and, in fp32, the keys
    for faiss and in its index, or an index of ours.
    """
    itemsize = DTYPES[options.dtype].itemsize
    row = tokens * shape.heads * shape.dim
    stored = 4 * row * itemsize if torch.device(options.device).type == "cpu" else 0
    needed = (1 + shape.group) * row * itemsize + stored + 3 * row * 4
    free = available_host_memory()
    if needed > free:
        raise ValueError(
            f"{tokens} tokens of {shape.heads} KV heads take {needed / 1e9:.1f} GB of host memory, "
            f"and {free / 1e9:.1f} GB are free: give a shorter --context, or fewer --heads or a "
            "smaller --group"
        )
