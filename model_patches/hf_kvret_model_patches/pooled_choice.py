"""GLM-5.3-Flash: what its indexer chose reaches the attention function, from any cache.

Its indexer chooses pools of tokens. In the middle of a pass it asks the cache how many tokens there
are, the new ones included; and its attention makes a mask of the choice, with a column for each key
that it saw, which are the new ones alone where a cache keeps the others for itself. Both are
patched on the class, as in ``latent``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_kvret_model_patches.wrappers import Patches

_MASK, _VISIBLE, _CHOICE = "build_attention_mask_from_topk", "get_visible_tokens", "hf_kvret_choice"
# The second until transformers 5.23.
_CACHE_NAMES = ("cache", "past_key_values")
_patches = Patches()
restore = _patches.restore


def apply(
    model: nn.Module, is_switched: Callable[[Any], bool], is_ours: Callable[[Any], bool]
) -> None:
    """Patch the classes of ``model``'s modules. Doing it twice is harmless.

    Args:
        model: whose attention is to be switched.
        is_switched: whether a configuration is that of a model with another attention function.
        is_ours: whether a cache has its new tokens pending until attention took place.
    """

    def build_mask(
        original: Callable[..., Any],
        module: Any,
        topk_indices: torch.Tensor,
        query_states: torch.Tensor,
        kv_length: int,
    ) -> Any:
        make = partial(original, module, topk_indices, query_states, kv_length)
        if not is_switched(module.config):
            return make()
        choice = topk_indices.detach()
        setattr(choice, _CHOICE, make)
        return choice

    def forward(original: Callable[..., Any], module: Any, **arguments: Any) -> torch.Tensor:
        for name in _CACHE_NAMES:
            if is_ours(cache := arguments.get(name)):
                new = arguments["hidden_states"].shape[1]
                arguments[name] = _grown(cache, module.layer_idx, new)
        return original(module, **arguments)

    _patches.apply_to(model, _MASK, _MASK, build_mask)
    _patches.apply_to(model, _VISIBLE, "forward", forward)


def mask_of_choice(mask: Any) -> Callable[[], torch.Tensor] | None:
    """What makes the mask for which a choice ``[B, Q, K]`` stands; None for what is no choice."""
    return getattr(mask, _CHOICE, None)


def _grown(cache: Any, number: int, new: int) -> Any:
    """``cache`` as an indexer of layer ``number`` expects it, with ``new`` pending tokens."""
    length = cache.get_seq_length(number) + new
    layer = SimpleNamespace(keys=torch.empty(length, 0), get_seq_length=lambda: length)
    return SimpleNamespace(layers={number: layer}, update_indexer=cache.update_indexer)
