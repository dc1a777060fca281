"""Keys and queries of one layer to make indexes of: synthetic ones, or a model's own.

Dimensions: Hq query heads, Hkv KV heads, l tokens, D head dim; the batch is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hf_kvret.benchmark.limits import available_host_memory
from hf_kvret.calibration.sources import needle_documents
from hf_kvret.config import RetrievalConfig
from hf_kvret.evaluation.recording import read_layers
from hf_kvret.evaluation.subject import Subject
from hf_kvret.evaluation.texts import read_text, token_ids
from hf_kvret.integration.compatibility import layer_shape, model_layers

RECENT = RetrievalConfig().recent
"""Tokens of a prompt behind those that are indexed: a cache keeps them in its window."""

# Tokens of a document of the needle model.
_DOCUMENT_LEN = 2048
_RANK = 16
_TOPIC_TOKENS = 64
_ROPE_BASE = 500_000.0
_DRAWN_ROWS = 1024
_KEY_NOISE = 1.0
_QUERY_NOISE = 0.5
# Of the low-rank part: with both noises, scores have a deviation of about 3.
_STRENGTH = 1.4


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer: KV heads, query heads of each, head dim."""

    heads: int
    group: int
    dim: int


@dataclass(frozen=True, eq=False)
class LayerKeys:
    """``queries [1, Hq, l, D]`` and ``keys [1, Hkv, l, D]`` of a layer, post-RoPE.

    ``scale`` and ``softcap`` are those of its scores.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scale: float
    softcap: float | None = None

    def __len__(self) -> int:
        return self.keys.shape[2]


def random_layer(
    shape: LayerShape, tokens: int, dtype: torch.dtype, device: torch.device, seed: int
) -> LayerKeys:
    """Synthetic keys and queries that have some of the structure of real ones.

    Each KV head has a stream of 16 numbers a token that drifts: anchors every 64 tokens, normal,
    with straight lines between them. A key and the queries of the group are linear maps of it (the
    queries' maps are those of the key with noise), plus a mean of their own, plus normal noise,
    rotated by RoPE (base 500,000). So neighbours in position are similar, and a query is drawn to
    the tokens of topics like its own. The numbers don't depend on the device, and a longer layer
    begins as a shorter one does: rows of a table that is gone on with have the same keys.

    Raises:
        ValueError: an odd head dim, which has no RoPE.
    """
    if shape.dim % 2:
        raise ValueError(f"--dim {shape.dim}: RoPE turns pairs of numbers; give an even one")
    seeds = torch.Generator().manual_seed(seed)
    queries = torch.empty(1, shape.heads * shape.group, tokens, shape.dim, dtype=dtype)
    keys = torch.empty(1, shape.heads, tokens, shape.dim, dtype=dtype)
    turns = _turns(tokens, shape.dim)
    for head in range(shape.heads):
        topics = _drifting(tokens, _next(seeds))
        drawn = _next(seeds)
        to_key = torch.randn(_RANK, shape.dim, generator=drawn) * _STRENGTH / math.sqrt(_RANK)
        keys[0, head] = _rotate(_tokens_of(topics, to_key, _KEY_NOISE, drawn), turns)
        for member in range(shape.group):
            drawn = _next(seeds)
            other = torch.randn(_RANK, shape.dim, generator=drawn) / math.sqrt(_RANK)
            found = _tokens_of(topics, to_key + 0.5 * other, _QUERY_NOISE, drawn)
            queries[0, head * shape.group + member] = _rotate(found, turns)
    return LayerKeys(queries.to(device), keys.to(device), shape.dim**-0.5)


def _drifting(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """``[tokens, rank]`` on straight lines between normal anchors."""
    anchors = _normal(tokens // _TOPIC_TOKENS + 2, _RANK, generator)
    places = torch.arange(tokens) / _TOPIC_TOKENS
    before = places.long()
    share = (places - before)[:, None]
    return torch.lerp(anchors[before], anchors[before + 1], share)


def _tokens_of(
    topics: torch.Tensor, weight: torch.Tensor, noise: float, generator: torch.Generator
) -> torch.Tensor:
    """``[tokens, D]`` before RoPE."""
    mean = torch.randn(weight.shape[1], generator=generator)
    drawn = _normal(len(topics), weight.shape[1], generator)
    return torch.addmm(mean + noise * drawn, topics, weight)


def _next(seeds: torch.Generator) -> torch.Generator:
    """A generator of its own, so that how much it draws changes nothing elsewhere."""
    return torch.Generator().manual_seed(int(torch.randint(1 << 62, (), generator=seeds)))


def _normal(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """``[rows, width]`` normal numbers, the first of which don't depend on how many there are."""
    blocks = range(-(-rows // _DRAWN_ROWS))
    drawn = [torch.randn(_DRAWN_ROWS, width, generator=generator) for _ in blocks]
    return torch.cat(drawn)[:rows]


def _turns(tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[tokens, D/2]``."""
    rates = _ROPE_BASE ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * rates
    return angles.cos().float(), angles.sin().float()


def _rotate(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosines, sines = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


@dataclass(frozen=True)
class Source:
    """Keys and queries of one layer, made when they are asked for.

    Attributes:
        shape: sizes of the layer.
        read: makes those of so many tokens.
        description: what identifies them, for JSON.
    """

    shape: LayerShape
    read: Callable[[int], LayerKeys]
    description: dict[str, Any]


def random_source(shape: LayerShape, dtype: torch.dtype, device: str, seed: int) -> Source:
    """Synthetic ones, see ``random_layer``."""
    place = torch.device(device)
    description = {"keys": "random", **vars(shape)}
    return Source(
        shape, lambda tokens: random_layer(shape, tokens, dtype, place, seed), description
    )


def model_source(
    subject: Subject, text: Path | None, layer: int | None, needed: int, seed: int = 0
) -> Source:
    """Those of a model's layer while it reads the beginning of a text; of all layers meanwhile.

    Args:
        text: of at least ``needed`` tokens; None for documents in the language of the model
            ``needle``, drawn with ``seed``.
        layer: None for the middle one.

    Raises:
        ValueError: a text that is too short, no tokenizer, or a layer without full attention.
            ``read`` raises it for more tokens than the model has positions for.
        FileNotFoundError: no such text.
    """
    ids, told = _model_tokens(subject, text, needed, seed)
    number = _layer_number(subject, layer)
    heads, kv_heads, dim = layer_shape(subject.model.config, number)
    shape = LayerShape(kv_heads, heads // kv_heads, dim)

    def read(tokens: int) -> LayerKeys:
        studies = read_layers(subject.model, ids[:tokens])
        (study,) = (study for study in studies if study.layer == number)
        queries, keys = (x[None].to(subject.model.dtype) for x in (study.queries, study.keys))
        return LayerKeys(queries, keys, study.scale, study.softcap)

    where = {"layer": number, **told, **vars(shape)}
    return Source(shape, read, {"keys": "model"} | subject.describe() | where)


def _model_tokens(
    subject: Subject, text: Path | None, needed: int, seed: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Token ids, and what they are, for JSON."""
    if text is None:
        # Whole documents, so that a longer text begins as a shorter one does.
        count = -(-needed // _DOCUMENT_LEN) * _DOCUMENT_LEN
        ids = torch.cat(list(needle_documents(count, _DOCUMENT_LEN, seed)))
        return ids, {"text": "needle language"}
    ids = token_ids(subject.need_tokenizer("--keys model"), read_text(text))
    if len(ids) < needed:
        raise ValueError(
            f"--text {text} has {len(ids)} tokens, the longest --context, {RECENT} recent ones and "
            f"--queries take {needed}: give a longer text, or a shorter --context"
        )
    return ids, {"text": text.name, "text_tokens": len(ids)}


def _layer_number(subject: Subject, layer: int | None) -> int:
    layers = enumerate(model_layers(subject.model.config))
    full = [number for number, one in layers if type(one) is DynamicLayer]
    if layer is not None and layer not in full:
        raise ValueError(
            f"--layer {layer}: layers of full attention in {subject.name} are "
            f"{', '.join(map(str, full))}"
        )
    return full[len(full) // 2] if layer is None else layer


def check_memory(shape: LayerShape, tokens: int, dtype: torch.dtype, device: str) -> None:
    """ValueError when host memory is short of what ``tokens`` take, as far as it can be foreseen.

    Keys and queries, on a CPU the store and its copy while it is filled; and, in fp32, the keys
    for faiss and in its index, or an index of ours.
    """
    row = tokens * shape.heads * shape.dim
    stored = 4 * row * dtype.itemsize if device == "cpu" else 0
    needed = (1 + shape.group) * row * dtype.itemsize + stored + 3 * row * 4
    free = available_host_memory()
    if needed > free:
        raise ValueError(
            f"{tokens} tokens of {shape.heads} KV heads take {needed / 1e9:.1f} GB of host memory, "
            f"and {free / 1e9:.1f} GB are free: give a shorter --context, or fewer --heads or a "
            "smaller --group"
        )
