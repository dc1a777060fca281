"""Multi-head latent attention as it was meant to be decoded: absorbed, over all tokens."""

from hf_kvret.methods.latent.cache import LatentConfig, LatentKVCache

__all__ = ["LatentConfig", "LatentKVCache"]
