"""What differs between the versions of transformers and torch that are supported.

Nothing else in the library looks at a version of transformers.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import Cache

TESTED = {"transformers": ("5.18", "5.24"), "torch": ("2.11", "2.13")}
"""Oldest and newest minor version by package that the tests passed with, both included."""

RELEASE = Version(transformers.__version__).release

CACHE_NAME = "cache" if RELEASE >= (5, 24) else "past_key_values"
"""What ``generate``, models, masks and outputs call the cache."""

CACHE_NAMES = ("cache", "past_key_values")
"""Names under which a caller may hand us a cache, whatever the version."""

CHUNKS_COUNT_PAST = RELEASE >= (5, 21)
"""Whether ``prefill_chunk_size`` counts tokens already cached, and cuts positions of any shape."""

CUTS_TOKEN_TYPES = RELEASE >= (5, 24)
"""Whether ``prefill_chunk_size`` cuts ``token_type_ids``, too."""

LAYERS_KNOW_DTYPE = RELEASE < (5, 24)
"""Whether a cache layer of keys and values has an attribute ``dtype``."""

DummyLayer: Any = getattr(cache_utils, "DummyLayer", type("Missing", (), {}))
"""The layer without keys that hybrid models have; a class of no object before transformers 5.23."""


def cache_of(output: Any) -> Any:
    """The cache in an output of a model or of ``generate``; None if it has none."""
    return getattr(output, CACHE_NAME, None)


def as_argument(cache: Any) -> dict[str, Any]:
    """Keyword arguments that hand ``cache`` to a model or to ``generate``."""
    return {CACHE_NAME: cache}


def cache_argument(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, under any of its names; None if there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def name_cache(arguments: MutableMapping[str, Any], name: str = CACHE_NAME) -> None:
    """Give the cache among keyword arguments the name that transformers expects.

    Only a cache is renamed: a model may have an argument ``cache`` of its own.

    Args:
        arguments: changed in place.
        name: that is expected; that of this version if it is left out.

    Raises:
        ValueError: there are caches under both names.
    """
    other = next(one for one in CACHE_NAMES if one != name)
    if other not in arguments or not isinstance(arguments[other], Cache | None):
        return
    cache = arguments.pop(other)
    if cache is not None and arguments.get(name) is not None:
        raise ValueError("cache and past_key_values are two names of one argument: pass one")
    if cache is not None:
        arguments[name] = cache


@functools.cache
def cache_name_of(cls: type[nn.Module]) -> str:
    """What the forward passes of modules of a class call the cache.

    The name of this version, unless only the other is among its parameters: code from a hub may
    know the old name alone.
    """
    parameters = inspect.signature(cls.forward).parameters
    names = [name for name in CACHE_NAMES if name in parameters]
    return CACHE_NAME if CACHE_NAME in names or not names else names[0]


def warn_untested() -> None:
    """Warn, once for each package, of a version outside the tested range."""
    for package, module in (("transformers", transformers), ("torch", torch)):
        oldest, newest = TESTED[package]
        release = Version(module.__version__).release[:2]
        if not Version(oldest).release <= release <= Version(newest).release:
            major, minor = newest.split(".")
            warnings.warn(
                f"hf_kvret was tested with {package} {oldest} to {newest}, this is "
                f"{module.__version__}: if something fails, install one of those "
                f"(pip install '{package}>={oldest},<{major}.{int(minor) + 1}')",
                stacklevel=3,
            )
