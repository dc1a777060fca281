"""Long-context generation made cheap, inside Hugging Face transformers.

    import hf_kvret
    model.generate(**inputs, cache_implementation="paris")

Importing registers the methods' names with transformers and touches no device.
"""

from hf_kvret.cache import RetrievalCache
from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import ColdTokens, Index
from hf_kvret.generate.attach import attach, restore
from hf_kvret.generate.conversation import chat
from hf_kvret.lossless.steps import LosslessSteps
from hf_kvret.methods.a2ats import A2ATSCache
from hf_kvret.methods.aqua import AquaKVCache
from hf_kvret.methods.ctkvr import CTkvrCache
from hf_kvret.methods.flat import FlatKVCache
from hf_kvret.methods.h2o import H2OCache
from hf_kvret.methods.latent import LatentKVCache
from hf_kvret.methods.lrqk import LRQKCache
from hf_kvret.methods.native import NativeKVCache
from hf_kvret.methods.paris import ParisKVCache
from hf_kvret.models.versions import warn_untested
from hf_kvret.observe.observers import Selection, observe
from hf_kvret.options.config import RetrievalConfig
from hf_kvret.registry import register, registered_methods, unregister
from hf_kvret.replay import DecodeGraph
from hf_kvret.shelf import Shelf, ShelfEntry, ask, document_ids
from hf_kvret.stores import Store
from hf_kvret.version import __version__ as __version__

__all__ = [
    "A2ATSCache",
    "AquaKVCache",
    "CTkvrCache",
    "ColdTokens",
    "DecodeGraph",
    "FlatKVCache",
    "H2OCache",
    "Index",
    "LRQKCache",
    "LatentKVCache",
    "LosslessSteps",
    "NativeKVCache",
    "ParisKVCache",
    "RetrievalCache",
    "RetrievalConfig",
    "Selection",
    "Shelf",
    "ShelfEntry",
    "Store",
    "TokenBlock",
    "ask",
    "attach",
    "chat",
    "document_ids",
    "observe",
    "register",
    "registered_methods",
    "restore",
    "unregister",
]

warn_untested()
register()
