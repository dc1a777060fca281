"""Recall of the exact top-k by layer, of a branch of a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.reader import Reader


@dataclass(frozen=True)
class LayerRecall:
    """Recall of one layer over some selections, each a share as in ``observe.recall.Recall``."""

    layer: int
    overlap: float
    mass: float
    best_mass: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def branch(reader: Reader) -> Reader:
    """A fork of ``reader`` that counts from here, with recall where its cache retrieves."""
    tracks = isinstance(reader.cache, RetrievalCache)
    return reader.fork(track_recall=True) if tracks else reader.fork()


def layer_recalls(reader: Reader) -> list[LayerRecall]:
    """Recall of each layer that selected since the reader was branched off; else nothing."""
    if not isinstance(reader.cache, RetrievalCache):
        return []
    names = ("layer", "recall_overlap", "recall_mass", "recall_best_mass")
    layers = reader.cache.stats()["layers"]
    return [
        LayerRecall(*(stats[name] for name in names))
        for stats in layers
        if "recall_overlap" in stats
    ]


def mean_recall(recalls: Sequence[LayerRecall]) -> dict[str, Any]:
    """``overlap``, ``mass`` and ``best_mass``, means over ``recalls``; None each for none."""
    names = ("overlap", "mass", "best_mass")
    return {
        name: sum(getattr(one, name) for one in recalls) / len(recalls) if recalls else None
        for name in names
    }


def mean_by_layer(samples: Sequence[Sequence[LayerRecall]]) -> list[LayerRecall]:
    """The recall of each layer, mean over the samples that have it."""
    by_layer: dict[int, list[LayerRecall]] = {}
    for one in (recall for sample in samples for recall in sample):
        by_layer.setdefault(one.layer, []).append(one)
    return [LayerRecall(layer, **mean_recall(some)) for layer, some in sorted(by_layer.items())]
