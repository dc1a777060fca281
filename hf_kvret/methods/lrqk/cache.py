"""LRQKCache: low-rank proxies, exact attention over what they choose."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.index import Index
from hf_kvret.methods.lrqk.als_index import PaperLRQKIndex
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.index import LRQKIndex
from hf_kvret.options.config import RetrievalConfig


class LRQKCache(RetrievalCache):
    """Scores of low-rank proxies choose the tokens (LRQK, sections 4.2 and 4.3).

    The published hit/miss buffer is ``store="resident"``, for this and every other method.
    """

    name: ClassVar[str] = "lrqk"
    Config: ClassVar[type[RetrievalConfig]] = LRQKConfig

    @classmethod
    def make_index(cls, options: Any, layer: int) -> Index:
        """A new, empty index; the same for every layer."""
        return LRQKIndex(options) if options.factors == "closed" else PaperLRQKIndex(options)
