"""The queries and keys of a model's layers, kept while it reads a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.index import ColdTokens
from hf_kvret.lab.evaluate.caches import CacheChoice
from hf_kvret.lab.evaluate.reader import Reader
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret.options.config import RetrievalConfig


@dataclass(frozen=True, eq=False)
class RecordedLayer:
    """Queries ``[Hq, l, D]`` and keys ``[Hkv, l, D]`` of a layer, fp32, post-RoPE.

    ``scale`` and ``softcap`` are those of the layer's scores.
    """

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    scale: float
    softcap: float | None


class RecordingIndex(FlatIndex):
    """Selects exactly, and keeps what it is shown; for one text that is read without a crop.

    Attributes:
        queries, keys: one ``[B, H, q, D]`` for each forward pass.
        scale, softcap: of the scores; known after the first selection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[torch.Tensor] = []
        self.keys: list[torch.Tensor] = []
        self.scale = 1.0
        self.softcap: float | None = None

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        self.queries.append(queries)
        self.keys.append(keys)

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        self.scale, self.softcap = cold.scale, cold.softcap
        return super().search(query, cold)


class RecordingCache(RetrievalCache):
    """Attends to everything and records all queries and keys."""

    name: ClassVar[str] = "recording"
    Config: ClassVar[type[RetrievalConfig]] = RetrievalConfig

    @classmethod
    def make_index(cls, options: Any, layer: int) -> RecordingIndex:
        """A new, empty index; the same for every layer."""
        return RecordingIndex()


def read_layers(model: PreTrainedModel, tokens: torch.Tensor) -> list[RecordedLayer]:
    """Queries and keys of every retrieval layer while the model reads ``tokens [l]``.

    All but the last token come in one pass; the last one comes alone, because a selection is what
    tells how scores are scaled. Attention is exact for both.
    """
    # Nothing is left out of the selection, so that what the last token sees is exact too.
    options = RetrievalConfig(top_k=1.0, sink=0, recent=1, flush=1, dense_below=0, store="device")
    choice = CacheChoice(
        "recording", lambda config, capacity: RecordingCache(config=config, options=options)
    )
    reader = Reader(model, choice, len(tokens))
    reader.prefill(tokens[:-1])
    reader.feed(tokens[-1:])
    layers = []
    for number, layer in enumerate(reader.cache.layers):
        if isinstance(layer, RetrievalLayer) and layer.kv is not None:
            index = layer.kv.index
            assert isinstance(index, RecordingIndex)
            queries, keys = (
                torch.cat(tensors, dim=2)[0].float() for tensors in (index.queries, index.keys)
            )
            layers.append(RecordedLayer(number, queries, keys, index.scale, index.softcap))
    return layers
