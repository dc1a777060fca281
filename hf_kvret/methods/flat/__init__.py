"""Exact top-k retrieval: the oracle."""

from hf_kvret.methods.flat.index import FlatConfig, FlatIndex, FlatKVCache

__all__ = ["FlatConfig", "FlatIndex", "FlatKVCache"]
