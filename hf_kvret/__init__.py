"""Long-context generation made cheap, inside Hugging Face transformers.

    import hf_kvret
    model.generate(**inputs, cache_implementation="paris")

Importing registers the methods' names with transformers and touches no device.
"""

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index
from hf_kvret.methods.a2ats import A2ATSCache, A2ATSConfig
from hf_kvret.methods.aqua import AquaConfig, AquaKVCache
from hf_kvret.methods.ctkvr import CTkvrCache, CTkvrConfig
from hf_kvret.methods.flat import FlatConfig, FlatKVCache
from hf_kvret.methods.h2o import H2OCache, H2OConfig
from hf_kvret.methods.latent import LatentConfig, LatentKVCache
from hf_kvret.methods.lrqk import LRQKCache, LRQKConfig
from hf_kvret.methods.paris import ParisConfig, ParisKVCache
from hf_kvret.models.versions import warn_untested
from hf_kvret.observe.observers import Selection, observe
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.registry import attach, register, registered_methods, restore, unregister
from hf_kvret.replay import DecodeGraph
from hf_kvret.stores import Store
from hf_kvret.version import __version__ as __version__

__all__ = [
    "A2ATSCache",
    "A2ATSConfig",
    "AquaConfig",
    "AquaKVCache",
    "CTkvrCache",
    "CTkvrConfig",
    "ColdTokens",
    "DecodeGraph",
    "FlatConfig",
    "FlatKVCache",
    "H2OCache",
    "H2OConfig",
    "Index",
    "LRQKCache",
    "LRQKConfig",
    "LatentConfig",
    "LatentKVCache",
    "ParisConfig",
    "ParisKVCache",
    "RetrievalCache",
    "RetrievalConfig",
    "Selection",
    "Store",
    "TokenBlock",
    "attach",
    "observe",
    "register",
    "registered_methods",
    "restore",
    "unregister",
]

warn_untested()
register()
