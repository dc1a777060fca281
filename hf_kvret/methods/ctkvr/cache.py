"""CTkvrCache: past queries as centroids, exact attention over what their lists hold."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_kvret.cache import RetrievalCache
from hf_kvret.methods.ctkvr.config import CTkvrConfig
from hf_kvret.methods.ctkvr.index import CTkvrIndex
from hf_kvret.options.config import RetrievalConfig


class CTkvrCache(RetrievalCache):
    """Attends to the best tokens in the lists of the past queries nearest to a query (CTkvr)."""

    name: ClassVar[str] = "ctkvr"
    Config: ClassVar[type[RetrievalConfig]] = CTkvrConfig

    @classmethod
    def make_index(cls, options: Any, layer: int) -> CTkvrIndex:
        """A new, empty index; the same for every layer."""
        return CTkvrIndex(options)
