"""AQUA-KV: attends to all cold tokens, stored as residuals of a prediction from the layer below."""

from hf_kvret.methods.aqua.cache import AquaKVCache
from hf_kvret.methods.aqua.config import AquaConfig
from hf_kvret.methods.aqua.store import AquaStore

__all__ = ["AquaConfig", "AquaKVCache", "AquaStore"]
