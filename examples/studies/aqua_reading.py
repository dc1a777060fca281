"""Perplexity of text that is read through a cache, and the bits that its values take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from ablation import made
from tqdm import tqdm
from transformers.cache_utils import DynamicLayer

from hf_kvret.cache import RetrievalCache
from hf_kvret.compatibility import model_layers
from hf_kvret.evaluation.caches import CacheChoice, choose_cache
from hf_kvret.evaluation.reader import Reader
from hf_kvret.evaluation.subject import Subject
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache
from hf_kvret.stores import Store, StoreChoice


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
    whose other layers keep their rows as they are.

    Args:
        subject: the model.
        options: of the one layer; its rows are coded as they are, so nothing is predicted.
        windows, step: as of ``read_through``.
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
            cls,
            options: AquaConfig,
            layer: int,
            stores: StoreChoice,
            device: torch.device,
            cold_bytes: int,
        ) -> Store:
            if layer == number:
                return super().make_store(options, layer, stores, device, cold_bytes)
            return stores.make(device, cold_bytes)

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
                raise ValueError(
                    "nothing was cold: take longer --lengths, or smaller regions as "
                    "aqua:recent=32:flush=32"
                )
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
