"""A layer that attends and keeps a linear state beside it (Falcon-H1, Zamba-2, Zaya).

The state is a layer of transformers; attention retrieves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from hf_kvret.layer.indexed import IndexedLatentLayer, IndexedLayer
from hf_kvret.layer.latent import LatentLayer
from hf_kvret.layer.layer import RetrievalLayer
from hf_kvret.models.compatibility import is_indexed


class HybridLayer(RetrievalLayer):
    """Attention that retrieves, beside transformers' linear layer, which answers for its states.

    Attributes:
        linear: holds convolutional and recurrent states.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.linear = LinearAttentionLayer()

    def __getattr__(self, name: str) -> Any:
        # Called for what the layer itself lacks, as conv_states. Whoever copies an object asks for
        # attributes before it has a linear layer, and would ask for that forever.
        if name == "linear":
            raise AttributeError(name)
        return getattr(self.linear, name)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the states can go back, too."""
        return self.linear.is_croppable

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b of the batch becomes the old row ``beam_idx[b]``."""
        self.linear.reorder_cache(beam_idx)
        super().reorder_cache(beam_idx)

    def fork(self) -> Self:
        """An independent copy that shares the cold part; states are copied."""
        twin = super().fork()
        twin.linear = copy.deepcopy(self.linear)
        return twin


# transformers looks for this class before it asks for a state.
LinearAttentionCacheLayerMixin.register(HybridLayer)


def foreign_layers_of(layers: Sequence[Any]) -> dict[int, Any]:
    """By number the layers that transformers itself keeps: whole ones, and those in hybrid ones."""
    parts = {number: getattr(layer, "linear", layer) for number, layer in enumerate(layers)}
    return {number: part for number, part in parts.items() if not isinstance(part, RetrievalLayer)}


def recording(layers: Sequence[Any]) -> list[Any]:
    """Those of transformers' layers that keep the past, to go back in it."""
    return [x for x in foreign_layers_of(layers).values() if getattr(x, "record_past", False)]


def stop_recording(layers: Sequence[Any], but: Sequence[Any]) -> None:
    """Cut layers back that record the past, as transformers leaves them when it has drafted.

    ``but``: go on recording.
    """
    for layer in recording(layers):
        if layer in but:
            continue
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.crop(0)
        for number, state in getattr(layer, "conv_states", {}).items():
            if state is not None:
                # Columns that a short text has not filled are zeros.
                surplus = state.shape[-1] - layer.conv_kernel_size[number]
                layer.conv_states[number] = torch.nn.functional.pad(state, (-surplus, 0))
        layer.record_past = False


def forget_states(layers: Sequence[Any]) -> None:
    """Have transformers' layers as new ones; their own ``reset`` keeps the number of sequences."""
    for layer in foreign_layers_of(layers).values():
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                empty = False if name.startswith(("is_", "has_")) else None
                setattr(layer, name, dict.fromkeys(value, empty))


def is_recurrent(layer: Any) -> bool:
    """Whether a layer has a state that no recorded past brings back."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) and not layer.is_croppable


def new_layer(stock: Any, *arguments: Any) -> RetrievalLayer:
    """The layer in place of ``stock``, which transformers would take; see ``RetrievalLayer``.

    The first of the ``arguments`` are the options; the last is the rank of latents, 0 where
    attention is not latent.
    """
    if is_indexed(stock):
        return (IndexedLatentLayer if arguments[-1] else IndexedLayer)(*arguments)
    if isinstance(stock, LinearAttentionCacheLayerMixin):
        layer = HybridLayer(*arguments)
        layer.linear = LinearAttentionLayer(number_of_states=stock.number_of_states)
        return layer
    return (LatentLayer if arguments[-1] else RetrievalLayer)(*arguments)
