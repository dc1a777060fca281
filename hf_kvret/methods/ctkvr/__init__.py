"""CTkvr: past queries are centroids, and name the tokens to compare exactly."""

from hf_kvret.methods.ctkvr.config import CTkvrConfig
from hf_kvret.methods.ctkvr.index import CTkvrCache, CTkvrIndex

__all__ = ["CTkvrCache", "CTkvrConfig", "CTkvrIndex"]
