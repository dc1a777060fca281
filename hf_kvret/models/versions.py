"""What differs between the versions of transformers and torch that are supported.

Nothing else in the library looks at a version of transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import cache_utils

TESTED = {"transformers": ("5.17", "5.24"), "torch": ("2.11", "2.13")}
"""Oldest and newest minor version by package that the tests passed with, both included."""

RELEASE = Version(transformers.__version__).release

CACHE_NAME = "cache" if RELEASE >= (5, 24) else "past_key_values"
"""What ``generate``, models, masks and outputs call the cache."""

CACHE_NAMES = ("cache", "past_key_values")
"""Names under which a caller may hand us a cache, whatever the version."""

CHUNKS_COUNT_PAST = RELEASE >= (5, 21)
"""Whether ``prefill_chunk_size`` counts tokens already cached, and cuts positions of any shape."""

LAYERS_KNOW_DTYPE = RELEASE < (5, 24)
"""Whether a cache layer of keys and values has an attribute ``dtype``."""


class _Missing:
    """Stands for a class that a version lacks."""


DummyLayer: Any = getattr(cache_utils, "DummyLayer", _Missing)
"""The layer without keys that hybrid models have; a class of no object in transformers 5.17."""


def cache_of(output: Any) -> Any:
    """The cache in an output of a model or of ``generate``; None if it has none."""
    return getattr(output, CACHE_NAME, None)


def as_argument(cache: Any) -> dict[str, Any]:
    """Keyword arguments that hand ``cache`` to a model or to ``generate``."""
    return {CACHE_NAME: cache}


def cache_argument(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, under any of its names; None if there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def name_cache(arguments: MutableMapping[str, Any]) -> None:
    """Give the cache among keyword arguments the name that this version of transformers expects.

    Raises:
        ValueError: it has both names.
    """
    other = next(name for name in CACHE_NAMES if name != CACHE_NAME)
    if other not in arguments:
        return
    if arguments.get(CACHE_NAME) is not None:
        raise ValueError("cache and past_key_values are two names of one argument: pass one")
    arguments[CACHE_NAME] = arguments.pop(other)


def warn_untested() -> None:
    """Warn, once for each package, of a version outside the tested range."""
    for package, module in (("transformers", transformers), ("torch", torch)):
        oldest, newest = TESTED[package]
        release = Version(module.__version__).release[:2]
        if not Version(oldest).release <= release <= Version(newest).release:
            warnings.warn(
                f"hf_kvret was tested with {package} {oldest} to {newest}, this is "
                f"{module.__version__}: if something fails, install one of those "
                f"(pip install '{package}>={oldest},<={newest}.*')",
                stacklevel=3,
            )
