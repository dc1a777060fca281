"""Exact top-k retrieval: the oracle."""

from hf_kvret.methods.flat.cache import FlatKVCache
from hf_kvret.methods.flat.config import FlatConfig
from hf_kvret.methods.flat.index import FlatIndex

__all__ = ["FlatConfig", "FlatIndex", "FlatKVCache"]
