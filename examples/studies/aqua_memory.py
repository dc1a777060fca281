"""Bits that AQUA-KV takes for each number of keys and values: on paper, and of real tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvret.calibration.aqua import AquaCalibration
from hf_kvret.calibration.aqua_coding import default_group
from hf_kvret.calibration.aqua_gptq import BITS, GROUP
from hf_kvret.calibration.runner import calibrate
from hf_kvret.calibration.sources import Corpus
from hf_kvret.layer import RetrievalLayer
from hf_kvret.methods.aqua import AquaKVCache

PUBLISHED_TOKENS = 131_072
KINDS = ("codes and scales", "first layer", "positions", "page tables, spare room", "predictors")
"""What bits are for; *first layer* is what it takes more than the others."""
_POSITION_BITS = 32
_SCALE_BITS = 16
# A scale and an offset, fp16, of GROUP numbers of a predictor in 4 bits.
_PREDICTOR_BITS = {"bf16": 16.0, "4 bits": BITS + 2 * 16 / GROUP}
PREDICTORS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"predictor_bits": 16},
    "4 bits": {"predictor_bits": BITS},
}
# To learn predictors from; their bytes do not depend on it.
_VOCABULARY, _SEQUENCES, _LENGTH = 64, 3, 128
# Of what a layer is said to take.
_COUNTED = ("rows", "positions", "held", "predictors")


@dataclass(frozen=True)
class Shape:
    """Keys and values of a model.

    Attributes:
        layers: with full attention.
        heads: KV heads.
        dim: of a head, of keys and of values.
    """

    layers: int
    heads: int
    dim: int

    @property
    def width(self) -> int:
        """Numbers of a token's keys."""
        return self.heads * self.dim

    def gibibytes(self, tokens: int, bits: float = 16.0) -> float:
        """Of keys and values, ``bits`` a number."""
        return 2 * self.layers * self.width * tokens * bits / 8 / 2**30


SHAPES = {"8B": Shape(32, 8, 128), "70B": Shape(80, 8, 128)}
"""Of Llama 3.1. A layer is the same in both."""


def bits_on_paper(
    shape: Shape, tokens: int, predictors: str, bits: int = 2, first_bits: int = 4
) -> dict[str, float]:
    """Bits for each number of keys and values, by what they are for, ``KINDS``, and ``all``.

    Args:
        shape: of the model.
        tokens: that share the predictors.
        predictors: ``"bf16"`` or ``"4 bits"``.
        bits, first_bits: of the codes, and of those of the first layer.
    """
    width, layers = shape.width, shape.layers
    # Keys from keys, values from keys and values; and a bias each, fp32.
    learned = 3 * width**2 * _PREDICTOR_BITS[predictors] + 2 * width * 32
    return _summed(
        bits + _SCALE_BITS / default_group("higgs", width),
        (first_bits - bits) / layers,
        _POSITION_BITS / (2 * width * layers),
        0.0,
        (layers - 1) * learned / (2 * width * layers * tokens),
    )


def measure(
    predictors: str, tokens: int, layers: int, heads: int = 8, dim: int = 128
) -> dict[str, Any]:
    """Bytes of a few layers of that shape in a real cache, filled with random keys and values.

    Returns ``tokens``, ``memory_bytes``, all of ``cache.memory()`` with the window, and ``layers``,
    for each its ``role``, bytes a token: ``rows`` (codes and scales), ``positions``, ``held`` (all
    of the store and the index, page tables and spare room too), and bytes of its ``predictors``.

    Args:
        predictors: ``"bf16"`` or ``"4 bits"``; they are learned from a random model.
        tokens: that are cold, beside a window.
        layers: at least 2, the first one is an anchor.
        heads, dim: KV heads, and numbers of a head.
    """
    model = _random_model(layers, heads, dim)
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="aqua-memory-") as folder:
        texts = list(torch.randint(_VOCABULARY, (_SEQUENCES, _LENGTH), generator=generator))
        calibration = AquaCalibration(**PREDICTORS[predictors])
        corpus = Corpus(texts, 0, {"text": "random tokens"})
        calibrate(model, corpus, calibration, Path(folder), layers_at_once=1, progress=False)
        cache = AquaKVCache(config=model.config, artifact=folder, dense_below=0, store="device")
        size = (1, heads, tokens + cache.options.recent, dim)
        rows = [torch.randn(size, generator=generator).bfloat16() for _ in range(2)]
        for layer in tqdm(cache.retrieval_layers, leave=False, desc="layers", unit="layer"):
            layer.lazy_initialization(*rows)
            assert layer.regions is not None
            with torch.no_grad():
                # A prompt that comes in one pass.
                layer.regions.watch(rows[0], rows[0], None, torch.arange(size[2])[None])
                layer.regions.take_prompt(*rows, None)
    memory = cache.memory()
    return {
        "tokens": tokens,
        "memory_bytes": memory.device + memory.host,
        "layers": [_layer_bytes(layer) for layer in cache.retrieval_layers],
    }


def bits_measured(shape: Shape, found: Mapping[str, Any], tokens: int) -> dict[str, float]:
    """As ``bits_on_paper``, of what ``measure`` found, for ``tokens`` that share the predictors."""
    first, *others = found["layers"]
    of_others = {name: fmean(one[name] for one in others) for name in _COUNTED}
    sums = {name: first[name] + (shape.layers - 1) * of_others[name] for name in _COUNTED}
    # Of bytes for a token in all layers.
    scale = 8 / (2 * shape.width * shape.layers)
    return _summed(
        of_others["rows"] * shape.layers * scale,
        (first["rows"] - of_others["rows"]) * scale,
        sums["positions"] * scale,
        (sums["held"] - sums["rows"] - sums["positions"]) * scale,
        sums["predictors"] / tokens * scale,
    )


def _summed(*bits: float) -> dict[str, float]:
    return {**dict(zip(KINDS, bits, strict=True)), "all": sum(bits)}


def _layer_bytes(layer: RetrievalLayer) -> dict[str, Any]:
    regions = layer.regions
    assert regions is not None and regions.store is not None
    state, count = regions.store.state_dict(), regions.cold_len
    held = regions.store.nbytes()
    index = regions.index
    return {
        "rows": (state["keys"].nbytes + state["values"].nbytes) / count,
        "positions": state["positions"].nbytes / count if "positions" in state else 0.0,
        "held": (held.device + held.host + index.nbytes()) / count,
        "predictors": index.shared_nbytes(),
        **regions.store.stats(),
    }


def _random_model(layers: int, heads: int, dim: int) -> LlamaForCausalLM:
    """A model whose layers have keys and values of that shape, small otherwise."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=dim,
        max_position_embeddings=2 * PUBLISHED_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return model.eval()
