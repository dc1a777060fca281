"""ParisKV: analytic centroids, collision counting, quantized reranking."""

from hf_kvret.methods.paris.cache import ParisKVCache
from hf_kvret.methods.paris.config import ParisConfig
from hf_kvret.methods.paris.index import ParisIndex

__all__ = ["ParisConfig", "ParisIndex", "ParisKVCache"]
