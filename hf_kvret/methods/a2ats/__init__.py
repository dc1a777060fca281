"""A2ATS: keys as codewords before RoPE, scored by looking up."""

from hf_kvret.methods.a2ats.cache import A2ATSCache
from hf_kvret.methods.a2ats.config import A2ATSConfig
from hf_kvret.methods.a2ats.index import A2ATSIndex

__all__ = ["A2ATSCache", "A2ATSConfig", "A2ATSIndex"]
