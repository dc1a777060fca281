"""H2OCache: keeps the tokens with most accumulated attention, evicts the others permanently."""

from __future__ import annotations

from typing import Any, ClassVar

from hf_kvret.cache import RetrievalCache
from hf_kvret.methods.h2o.config import H2OConfig
from hf_kvret.methods.h2o.index import H2OIndex
from hf_kvret.options.config import RetrievalConfig


class H2OCache(RetrievalCache):
    """Attends to the ``top_k`` cold tokens with most accumulated attention only (H2O).

    Evicted tokens stay in the store, so eviction itself frees no memory.
    """

    name: ClassVar[str] = "h2o"
    Config: ClassVar[type[RetrievalConfig]] = H2OConfig

    @classmethod
    def make_index(cls, options: Any, layer: int) -> H2OIndex:
        """A new, empty index; the same for every layer."""
        return H2OIndex(options)
