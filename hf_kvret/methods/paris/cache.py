"""ParisKVCache: drift-robust retrieval."""

from __future__ import annotations

from typing import ClassVar

from hf_kvret.cache import RetrievalCache
from hf_kvret.methods.paris.config import ParisConfig
from hf_kvret.methods.paris.index import ParisIndex
from hf_kvret.options.config import RetrievalConfig


class ParisKVCache(RetrievalCache):
    """Finds cold tokens by sign-pattern collisions and reranks them by 4-bit codes.

    ``ParisKVCache(config=model.config)`` uses our best variant;
    ``ParisKVCache(model.config, ParisConfig.paper())`` the published algorithm.
    """

    name: ClassVar[str] = "paris"
    Config: ClassVar[type[RetrievalConfig]] = ParisConfig

    @classmethod
    def make_index(cls, options: ParisConfig, layer: int) -> ParisIndex:
        """A new, empty index; the same for every layer."""
        return ParisIndex(options)
