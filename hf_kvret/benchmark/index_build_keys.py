"""Keys and queries of one layer to make indexes of: synthetic ones, or a model's own.

Dimensions: Hq query heads, Hkv KV heads, l tokens, D head dim; the batch is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hf_kvret.config import RetrievalConfig
from hf_kvret.evaluation.recording import read_layers
from hf_kvret.evaluation.subject import Subject

RECENT = RetrievalConfig().recent
"""Tokens of a prompt behind those that are indexed: a cache keeps them in its window."""

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


def model_layer(
    subject: Subject, tokens: torch.Tensor, layer: int, dtype: torch.dtype
) -> LayerKeys:
    """What the retrieval layer with number ``layer`` has while the model reads ``tokens [l]``.

    All layers' queries and keys are held while it reads.

    Raises:
        ValueError: more tokens than the model has positions for.
    """
    (found,) = (one for one in read_layers(subject.model, tokens) if one.layer == layer)
    queries, keys = (x[None].to(dtype) for x in (found.queries, found.keys))
    return LayerKeys(queries, keys, found.scale, found.softcap)


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
