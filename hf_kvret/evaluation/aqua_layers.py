"""What coding a single layer costs: where a model is hurt by its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hf_kvret.compatibility import model_layers
from hf_kvret.evaluation.aqua_perplexity import read_through
from hf_kvret.evaluation.caches import CacheChoice, choose_cache
from hf_kvret.evaluation.subject import Subject
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache
from hf_kvret.stores import Store, StoreChoice

_KEPT = ("ppl", "window_nats")


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
    full = choose_cache("full")
    found = []
    for number in (n for n, kind in enumerate(kinds) if type(kind) is DynamicLayer):
        choice = _one_layer(number, options)
        found.append({"layer": number, **_kept(read_through(subject, choice, windows, step))})
    return {"full": _kept(read_through(subject, full, windows, step)), "layers": found}


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in _KEPT}


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

    return CacheChoice(
        f"layer {number} alone",
        lambda config, capacity: OneLayerCache(config=config, options=options),
        options=options,
    )
