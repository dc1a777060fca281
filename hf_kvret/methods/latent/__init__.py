"""Multi-head latent attention as it was meant to be decoded: absorbed, over all tokens."""

from hf_kvret.methods.latent.cache import LatentKVCache
from hf_kvret.methods.latent.config import LatentConfig

__all__ = ["LatentConfig", "LatentKVCache"]
