"""A2ATS: keys before RoPE as codewords, scored by table lookup."""

from hf_kvret.methods.a2ats.cache import A2ATSCache
from hf_kvret.methods.a2ats.config import A2ATSConfig
from hf_kvret.methods.a2ats.index import A2ATSIndex

__all__ = ["A2ATSCache", "A2ATSConfig", "A2ATSIndex"]
