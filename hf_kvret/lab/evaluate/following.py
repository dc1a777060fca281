"""Following a text through a cache: recall of the exact top-k, and what full attention says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.reader import Reader

_PIECE = 128


@dataclass(frozen=True)
class LayerRecall:
    """Recall of one layer over some selections; numbers as in ``core.recall.Recall``."""

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
    return [
        LayerRecall(
            stats["layer"],
            stats["recall_overlap"],
            stats["recall_mass"],
            stats["recall_best_mass"],
        )
        for stats in reader.cache.stats()["layers"]
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


class Kept:
    """Tensors that were made for a model, for as long as it lives; the oldest go first.

    Args:
        most: kept for each model.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: WeakKeyDictionary[PreTrainedModel, dict[Any, torch.Tensor]] = (
            WeakKeyDictionary()
        )

    def get(
        self, model: PreTrainedModel, key: Any, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """What is kept for ``key``, made first where it is missing."""
        held = self._held.setdefault(model, {})
        if key not in held:
            while len(held) >= self.most:
                del held[next(iter(held))]
            held[key] = make()
        return held[key]


_choices = Kept(most=8)


def full_logits(model: PreTrainedModel, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """``[n - start, vocab]`` fp32 on the CPU: full attention's logits after ``tokens[start:]``."""
    return torch.cat([logits.float().cpu() for logits in _full_pieces(model, tokens, start)])


def full_choices(model: PreTrainedModel, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """``[n - start]`` int64 on the CPU: full attention's best token after each of those.

    Kept for the last few texts, as several caches are asked about the same one.
    """

    def make() -> torch.Tensor:
        pieces = _full_pieces(model, tokens, start)
        return torch.cat([logits.argmax(-1).cpu() for logits in pieces])

    return _choices.get(model, (tuple(tokens.tolist()), start), make)


def _full_pieces(
    model: PreTrainedModel, tokens: torch.Tensor, start: int
) -> Iterator[torch.Tensor]:
    """Logits of pieces, so that a long text with a large vocabulary fits."""
    reader = Reader(model, choose_cache("full"), len(tokens))
    reader.prefill(tokens[:start])
    for piece in tokens[start:].split(_PIECE):
        yield reader.feed(piece, keep=len(piece))
