"""What AQUA-KV is measured by: perplexity of text, and bits of its values, on paper and real."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from ablation import made
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from hf_kvret.cache import RetrievalCache
from hf_kvret.calibration.corpus import Corpus
from hf_kvret.calibration.runner import calibrate
from hf_kvret.core.layer import RetrievalLayer
from hf_kvret.evaluation.caches import CacheChoice, choose_cache
from hf_kvret.evaluation.reader import Reader
from hf_kvret.evaluation.subject import Subject
from hf_kvret.integration.compatibility import model_layers
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache
from hf_kvret.methods.aqua.calibrator import AquaCalibration
from hf_kvret.methods.aqua.coding import default_group
from hf_kvret.methods.aqua.gptq import BITS, GROUP
from hf_kvret.stores import Store, StoreChoice

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
    """Keys and values of a model: layers with full attention, KV heads, numbers of a head."""

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

    ``tokens`` share the ``predictors``, ``"bf16"`` or ``"4 bits"``; codes have ``bits``, those of
    the first layer ``first_bits``.
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

    Returns ``tokens``, which are cold beside a window; ``memory_bytes``, all of ``cache.memory()``
    with the window; and ``layers``, for each its ``role``, bytes a token: ``rows`` (codes and
    scales), ``positions``, ``held`` (all of the store and the index, page tables and spare room
    too), and bytes of its ``predictors``, ``"bf16"`` or ``"4 bits"``, learned from a random model.
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
                layer.regions.on_forward(rows[0], rows[0], None, torch.arange(size[2])[None])
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
    return {
        "rows": (state["keys"].nbytes + state["values"].nbytes) / count,
        "positions": state["positions"].nbytes / count if "positions" in state else 0.0,
        "held": (regions.store.nbytes() + regions.positions.nbytes()) / count,
        "predictors": regions.store.shared_nbytes(),
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


def read_through(
    subject: Subject, choice: CacheChoice, windows: Sequence[torch.Tensor], step: int
) -> dict[str, Any]:
    """Perplexity over ``windows [n]``, alike in length, each read ``step`` tokens a forward pass.

    They are read from their start, so that a token attends to what the cache has made of those
    before it, as the paper has it; all but the first token of a window count. Returns ``ppl``,
    ``nats``, ``tokens``, ``window_nats`` of each window, ``seconds`` of all forward passes, and of
    the last window's end:

    ``bits`` that a number of a key or value takes in the cold part (``value_bits``), ``full_bits``
    that it takes in the model's dtype; ``held_ratio``, all bytes as a share of full keys and
    values, spare room and predictors included; ``predictor_bytes``.

    Raises:
        ValueError: nothing was cold; a step that the cache would not take as drafted tokens.
    """
    means, count, seconds = [], 0, 0.0
    for window in tqdm(windows, leave=False, unit="window", desc=choice.name):
        reader = Reader(subject.model, choice, len(window))
        reader.check_step(step)
        losses = _losses(reader, window, step)
        means.append(losses.double().mean().item())
        count += len(losses)
        seconds += reader.seconds
    usage = reader.usage()
    cache = reader.cache
    shared = cache.memory().shared if isinstance(cache, RetrievalCache) else 0
    nats = fmean(means)
    return {
        "ppl": math.exp(nats),
        "nats": nats,
        "tokens": count,
        "window_nats": means,
        "bits": value_bits(reader),
        "full_bits": 8 * subject.model.dtype.itemsize,
        "held_ratio": (usage.device_bytes + usage.host_bytes) / usage.full_bytes,
        "predictor_bytes": shared,
        "seconds": seconds,
    }


def one_layer_each(
    subject: Subject, options: AquaConfig, windows: Sequence[torch.Tensor], step: int
) -> dict[str, Any]:
    """``full``, and ``layers``: for each its number, and ``ppl`` and ``window_nats`` of a cache
    whose other layers keep their rows as they are; its own are coded by ``options`` as they are.
    """
    assert options.predictor == "none", "a predictor reads what the layer below lost"
    kinds = model_layers(subject.model.config)

    def read(choice: CacheChoice) -> dict[str, Any]:
        found = read_through(subject, choice, windows, step)
        return {name: found[name] for name in ("ppl", "window_nats")}

    layers = [
        {"layer": number, **read(_one_layer(number, options))}
        for number, kind in enumerate(kinds)
        if type(kind) is DynamicLayer
    ]
    return {"full": read(choose_cache("full")), "layers": layers}


def _one_layer(number: int, options: AquaConfig) -> CacheChoice:
    class OneLayerCache(AquaKVCache):
        """Codes model layer ``number``; the others keep their rows."""

        @classmethod
        def make_store(
            cls, options: AquaConfig, layer: int, stores: StoreChoice, *rest: Any, **named: Any
        ) -> Store:
            if layer == number:
                return super().make_store(options, layer, stores, *rest, **named)
            return stores.make(*rest, **named)

    return made(f"layer {number} alone", OneLayerCache, options)


def value_bits(reader: Reader) -> float:
    """Bits that a number of a coded key or value takes, mean over layers; whole tokens alone.

    Of ours the rows as they are kept, with positions; of transformers' quantized layers codes and
    scales; of a dynamic layer its dtype. Windows of recent tokens don't count.

    Raises:
        ValueError: ours has nothing cold.
    """
    cache = reader.cache
    if isinstance(cache, RetrievalCache):
        held, numbers = 0, 0
        for layer in cache.retrieval_layers:
            regions = layer.regions
            if regions is None or regions.store is None or not regions.cold_len:
                regions_as = "smaller regions as aqua:recent=32:flush=32"
                raise ValueError(f"nothing was cold: take a longer --context, or {regions_as}")
            keys, values = regions.window.keys, regions.window.values
            held += stored_bytes(regions.store)
            numbers += (
                len(keys) * keys.shape[1] * regions.cold_len * (keys.shape[3] + values.shape[3])
            )
        return 8 * held / numbers
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        return 8.0 * reader.model.dtype.itemsize
    usage = reader.usage()
    # Recent tokens of a quantized layer lie beside its codes, in full.
    recent = [layer.keys for layer in cache.layers]
    recent_bytes = sum(2 * keys.nbytes for keys in recent)
    lengths = [keys.shape[-2] if keys.dim() == 4 else 0 for keys in recent]
    coded = 1 - sum(lengths) / (reader.length * len(lengths))
    full_bits = 8 * reader.model.dtype.itemsize
    held = usage.device_bytes + usage.host_bytes - recent_bytes
    return full_bits * held / (usage.full_bytes * coded)


def stored_bytes(store: Store) -> int:
    """Bytes of a store's codes, scales and positions, without spare room and page tables."""
    state = store.state_dict()
    # Beside these it tells a few numbers about their making.
    return sum(x.nbytes for x in state.values() if x.ndim >= 3)


def _losses(reader: Reader, window: torch.Tensor, step: int) -> torch.Tensor:
    """``[len(window) - 1]`` in nats."""
    found, last = [], None
    pieces = tqdm(window.split(step), leave=False, desc=reader.choice.name, mininterval=1)
    for tokens in pieces:
        new = reader.feed(tokens, keep=len(tokens))
        # The logits before a step foretell the first of its tokens, its own all others.
        foretold = new[:-1] if last is None else torch.cat([last, new[:-1]])
        truth = (tokens if last is not None else tokens[1:]).to(foretold.device)
        losses = torch.nn.functional.cross_entropy(foretold.float(), truth, reduction="none")
        found.append(losses.cpu())
        last = new[-1:]
    return torch.cat(found)
