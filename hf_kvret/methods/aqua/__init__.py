"""AQUA-KV: all cold tokens, as codes of what the layer below does not predict."""

from hf_kvret.methods.aqua.cache import AquaKVCache
from hf_kvret.methods.aqua.config import AquaConfig
from hf_kvret.methods.aqua.store import AquaStore

__all__ = ["AquaConfig", "AquaKVCache", "AquaStore"]
