"""The indices of a model's own indexer select."""

from hf_kvret.methods.native.cache import NativeConfig, NativeKVCache

__all__ = ["NativeConfig", "NativeKVCache"]
