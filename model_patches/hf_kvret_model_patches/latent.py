"""Latent attention: modules hand latents on to the attention function where a cache asks for them.

Models of multi-head latent attention expand what their cache gives back, the latents of all tokens,
into keys and values of every head: ``expand_kv(latents, rope_keys)``. It is patched on the class: a
function on an instance would survive ``copy.deepcopy`` and call the module that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_kvret_model_patches.wrappers import Patches

_METHOD = "expand_kv"
Expand = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_patches = Patches()
restore = _patches.restore


def apply(model: nn.Module, keeps_latents: Callable[[torch.Tensor], bool]) -> None:
    """Patch the classes of ``model``'s modules. Doing it twice is harmless.

    Latents for which ``keeps_latents`` is true are given back as they are, with their rotated keys;
    all others are expanded as before.
    """

    def expand_kv(
        original: Expand, module: nn.Module, kv_nope: torch.Tensor, k_rot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (kv_nope, k_rot) if keeps_latents(kv_nope) else original(module, kv_nope, k_rot)

    _patches.apply_to(model, _METHOD, _METHOD, expand_kv)


def expand(
    module: nn.Module, latents: torch.Tensor, rope_keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[B, H, n, nope + rope]`` and values ``[B, H, n, v]``, as transformers makes them.

    Args:
        module: the attention of a layer.
        latents: ``[B, 1, n, R]``.
        rope_keys: rotated keys ``[B, 1, n, rope]``.
    """
    method: Any = getattr(module, _METHOD)
    # A view has no mark by which a cache asks for latents.
    keys, values = method(latents.view_as(latents), rope_keys)
    return keys, values
