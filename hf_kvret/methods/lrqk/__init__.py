"""LRQK: low-rank proxies of queries and keys choose the tokens."""

from hf_kvret.methods.lrqk.als import PaperLRQKIndex
from hf_kvret.methods.lrqk.config import LRQKConfig
from hf_kvret.methods.lrqk.index import LRQKCache, LRQKIndex

__all__ = ["LRQKCache", "LRQKConfig", "LRQKIndex", "PaperLRQKIndex"]
