"""FlatKVCache: exact top-k retrieval."""

from __future__ import annotations

from typing import ClassVar

from hf_kvret.cache import RetrievalCache
from hf_kvret.methods.flat.config import FlatConfig
from hf_kvret.methods.flat.index import FlatIndex
from hf_kvret.options.config import RetrievalConfig


class FlatKVCache(RetrievalCache):
    """Attends to the exact top-k of the cold tokens: the reference for all other methods."""

    name: ClassVar[str] = "flat"
    Config: ClassVar[type[RetrievalConfig]] = FlatConfig

    @classmethod
    def make_index(cls, options: RetrievalConfig, layer: int) -> FlatIndex:
        """A new, empty index; the same for every layer."""
        return FlatIndex()
