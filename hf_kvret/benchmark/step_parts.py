"""Which part of a decode step is at work: named while a benchmark looks, at no cost otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_kvret import layer as layer_module
from hf_kvret.cache import RetrievalCache
from hf_kvret.calls import AttentionCall
from hf_kvret.layer import RetrievalLayer

WEIGHTS, NORMS, WINDOW = "weights", "norms", "window"
SELECT, STORE, MERGE = "index", "store", "merge"
CACHE, ATTENTION, OTHER = "cache, rest", "attention, rest", "other"
PARTS = (WEIGHTS, NORMS, WINDOW, SELECT, STORE, MERGE, CACHE, ATTENTION, OTHER)
"""Parts of a step: matrices of the model; norms; attention over the window; finding tokens; reading
and attending to them; merging the two; what else a retrieval layer does; what else the model's
attention does (rotations, and all of it where the cache does not retrieve); all the rest."""

RANGE_PREFIX = "hf_kvret.part/"


class Parts:
    """Names the part at work: in ``now``, and as a range of torch's profiler.

    Attributes:
        now: the innermost part that is open, ``OTHER`` outside of all.
    """

    def __init__(self) -> None:
        self._open: list[str] = []

    @property
    def now(self) -> str:
        return self._open[-1] if self._open else OTHER

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """The part ``name`` is at work."""
        self._open.append(name)
        try:
            with torch.profiler.record_function(RANGE_PREFIX + name):
                yield
        finally:
            self._open.pop()

    def wrap(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``work`` as part ``name``; inside the store it stays the store's."""

        @wraps(work)
        def named(*args: Any, **kwargs: Any) -> Any:
            if self.now == STORE:
                return work(*args, **kwargs)
            with self.named(name):
                return work(*args, **kwargs)

        return named

    @contextmanager
    def watching(self, model: PreTrainedModel, cache: Cache) -> Iterator[None]:
        """Context in which forward passes of ``model`` with the filled ``cache`` name their parts.

        Methods are wrapped meanwhile: take steps as they are, not through a ``DecodeGraph``.
        """
        with ExitStack() as stack:
            for module in model.modules():
                name = _module_part(module)
                if name is not None:
                    stack.enter_context(self._wrapped(module, name))
            if isinstance(cache, RetrievalCache):
                for change in self._changes(cache):
                    stack.enter_context(change)
            yield

    @contextmanager
    def _wrapped(self, module: nn.Module, name: str) -> Iterator[None]:
        with patch.object(module, "forward", self.wrap(module.forward, name)):
            yield

    def _changes(self, cache: RetrievalCache) -> Iterator[AbstractContextManager[Any]]:
        for owner, method, name in (
            (RetrievalLayer, "attend", CACHE),
            (RetrievalLayer, "_attend_whole", STORE),
            (AttentionCall, "partial", WINDOW),
            (layer_module, "merge", MERGE),
        ):
            yield patch.object(owner, method, self.wrap(getattr(owner, method), name))
        for layer in cache.retrieval_layers:
            regions = layer.regions
            if regions is None or regions.store is None:
                continue
            for method in ("select", "learn"):
                yield patch.object(
                    regions.index, method, self.wrap(getattr(regions.index, method), SELECT)
                )
            yield patch.object(regions.store, "begin", self._begin(regions.store.begin))

    def _begin(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """``Store.begin``, whose work goes on in the function that it returns."""

        @wraps(begin)
        def named(*args: Any, **kwargs: Any) -> Any:
            with self.named(STORE):
                return self.wrap(begin(*args, **kwargs), STORE)

        return named


def _module_part(module: nn.Module) -> str | None:
    """By what the module is: a matrix, a norm, an attention, or none of these."""
    weight = getattr(module, "weight", None)
    leaf = isinstance(weight, torch.Tensor) and not any(True for _ in module.children())
    if leaf and not isinstance(module, nn.Embedding):
        assert isinstance(weight, torch.Tensor)
        return WEIGHTS if weight.ndim == 2 else NORMS
    return ATTENTION if type(module).__name__.endswith("Attention") else None
