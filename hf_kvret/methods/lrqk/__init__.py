"""LRQK: low-rank proxies of queries and keys choose the tokens."""

from hf_kvret.methods.lrqk.cache import LRQKCache
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.index import LRQKIndex
from hf_kvret.methods.lrqk.paper import PaperLRQKIndex

__all__ = ["LRQKCache", "LRQKConfig", "LRQKIndex", "PaperLRQKIndex"]
