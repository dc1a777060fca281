"""Who is told what the layers of a cache select."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from transformers.cache_utils import Cache

from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.observe.selection import Observer


@contextmanager
def observe(cache: Cache, observer: Observer) -> Iterator[None]:
    """Call ``observer`` with a ``Selection`` for every step of every layer that retrieves.

        seen = []
        with hf_kvret.observe(cache, seen.append):
            model.generate(**inputs, past_key_values=cache)

    For study, with any method and store. A step is a forward pass of up to ``max_draft`` tokens
    after a prompt, in a layer with cold tokens; in prompts, and in shorter caches, nothing is
    selected. Where layers share a cache, each is told of. Forks are not observed. While a cache is
    observed its steps are not replayed from a CUDA graph. What the observer raises breaks off the
    forward pass.

    Args:
        cache: a retrieval cache; TypeError for another.
        observer: called in the thread of the forward pass.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, RetrievalLayer)]
    if not layers:
        raise TypeError(
            f"cache is a {type(cache).__name__}: only a retrieval cache selects; make one, as "
            "hf_kvret.ParisKVCache(config=model.config)"
        )
    # An object of this call, so that the same observer may be there twice.
    entry = partial(observer)
    for layer in layers:
        layer.counters.observers = (*layer.counters.observers, entry)
        # What was captured before would not tell.
        layer.edits += 1
    try:
        yield
    finally:
        for layer in layers:
            others = (one for one in layer.counters.observers if one is not entry)
            layer.counters.observers = tuple(others)
