"""A2ATS: keys before RoPE as codewords, scored by table lookup."""

from hf_kvret.methods.a2ats.index import A2ATSCache, A2ATSConfig, A2ATSIndex

__all__ = ["A2ATSCache", "A2ATSConfig", "A2ATSIndex"]
