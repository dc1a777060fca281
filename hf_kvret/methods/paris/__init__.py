"""ParisKV: analytic centroids, collision counting, quantized reranking."""

from hf_kvret.methods.paris.index import ParisConfig, ParisIndex, ParisKVCache

__all__ = ["ParisConfig", "ParisIndex", "ParisKVCache"]
