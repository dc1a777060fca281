"""Registration with transformers: method names, attention functions, and hooks of ``generate``."""

from __future__ import annotations

from hf_kvret.attention.attention import retrieval_attention
from hf_kvret.attention.base import OUR_NAMES
from hf_kvret.attention.masks import retrieval_mask
from hf_kvret.cache import RetrievalCache
from hf_kvret.generate.attach import ATTENTION_NAME, attached, restore
from hf_kvret.generate.call import around_generate, decode_call, prepare_cache
from hf_kvret.generate.checks import check_pass, keep_cache, refuse_batch
from hf_kvret.methods.a2ats import A2ATSCache
from hf_kvret.methods.aqua import AquaKVCache
from hf_kvret.methods.ctkvr import CTkvrCache
from hf_kvret.methods.flat import FlatKVCache
from hf_kvret.methods.h2o import H2OCache
from hf_kvret.methods.known import METHODS
from hf_kvret.methods.latent import LatentKVCache
from hf_kvret.methods.lrqk import LRQKCache
from hf_kvret.methods.native import NativeKVCache
from hf_kvret.methods.paris import ParisKVCache
from hf_kvret.models.versions import name_cache
from hf_kvret_model_patches import generation, latent, mappings, pooled_choice

BUILT_IN: tuple[type[RetrievalCache], ...] = (
    FlatKVCache,
    ParisKVCache,
    LRQKCache,
    CTkvrCache,
    A2ATSCache,
    AquaKVCache,
    H2OCache,
    LatentKVCache,
    NativeKVCache,
)


def register(*cache_classes: type[RetrievalCache]) -> None:
    """Make methods known to transformers, as ``cache_implementation`` and attention names.

    Importing hf_kvret registers its own; call it with a class of yours, or with nothing to
    register ours again after ``unregister()``. Doing it twice is harmless.

    Raises:
        TypeError: no class of a cache of ours, or one without a name or options.
        ValueError: the name belongs to transformers or to another class.
    """
    classes = cache_classes or BUILT_IN
    for cls in classes:
        named = isinstance(cls, type) and isinstance(getattr(cls, "name", None), str) and cls.name
        if not (named and issubclass(cls, RetrievalCache) and hasattr(cls, "Config")):
            raise TypeError(f"{cls!r}: pass a subclass of RetrievalCache with a name and a Config")
        owner = METHODS.get(cls.name)
        theirs = generation.foreign_names() | mappings.foreign_names() | {"eager"}
        is_taken = cls.name == ATTENTION_NAME or (cls.name in theirs and owner is None)
        if is_taken or owner not in (None, cls):
            raise ValueError(f"the name {cls.name!r} is taken: choose another for {cls.__name__}")
    METHODS.update({cls.name: cls for cls in classes})
    for name in (ATTENTION_NAME, *METHODS):
        mappings.add(name, retrieval_attention, retrieval_mask)
        OUR_NAMES.add(name)
    hooks = generation.Hooks(
        name_arguments=name_cache,
        around=around_generate,
        prepare_cache=prepare_cache,
        check_batch=refuse_batch,
        before_pass=keep_cache,
        after_pass=check_pass,
        choose_call=decode_call,
    )
    generation.apply(tuple(METHODS), hooks)


def unregister() -> None:
    """Undo ``register`` and put every switched model back. Doing it twice is harmless.

    What other libraries wrapped around the same functions of transformers since, and names that
    they added, stay.
    """
    for model in list(attached):
        restore(model)
    generation.restore()
    latent.restore()
    pooled_choice.restore()
    for name in (ATTENTION_NAME, *METHODS):
        mappings.remove(name)
    METHODS.clear()


def registered_methods() -> dict[str, type[RetrievalCache]]:
    """Registered methods by name."""
    return dict(METHODS)
