"""A layer as its store knows it: not kept alive, with the store of the layer below."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Protocol, Self

from hf_kvret.contracts.store import FirstRows, Store
from hf_kvret.layer.layer_kv import LayerKV, MakeStore


class StoringLayer(Protocol):
    """The attributes of a ``RetrievalLayer`` that this module uses."""

    kv: LayerKV | None
    make_store: MakeStore

    @property
    def below(self) -> Self | None:
        """The layer before it."""


class LayerReference:
    """A layer, not kept alive; unlike a weak reference it can be pickled."""

    def __init__(self, layer: StoringLayer | None) -> None:
        self._reference = None if layer is None else weakref.ref(layer)

    def __call__(self) -> StoringLayer | None:
        return None if self._reference is None else self._reference()

    def __reduce__(self) -> tuple[type[LayerReference], tuple[StoringLayer | None]]:
        return LayerReference, (self(),)


def new_store(own: LayerReference, first: FirstRows) -> Store:
    """The store of a layer, which knows the one of the layer below."""
    layer = own()
    if layer is None:
        raise RuntimeError(
            "the cache of this layer was dropped: keep it as long as anything of it is used"
        )
    store = layer.make_store(first)
    store.below = partial(store_below, own)
    return store


def store_below(own: LayerReference) -> Store | None:
    """The store of the layer below; None where there is none, or where it is empty."""
    layer = own()
    below = None if layer is None or layer.below is None else layer.below.kv
    return None if below is None else below.store
