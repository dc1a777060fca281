"""Latent attention: modules hand latents on to the attention function where a cache asks for them.

Models of multi-head latent attention expand what their cache gives back, the latents of all tokens,
into keys and values of every head: ``expand_kv(latents, rope_keys)``. It is patched on the class: a
function on an instance would survive ``copy.deepcopy`` and call the module that it was made for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_METHOD = "expand_kv"
Expand = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_originals: dict[type, Expand] = {}


def apply(model: nn.Module, hands_on: Callable[[torch.Tensor], bool]) -> None:
    """Patch the classes of ``model``'s modules. Doing it twice is harmless.

    Latents for which ``hands_on`` is true are given back as they are, with their rotated keys; all
    others are expanded as before.
    """
    for owner in {owner for module in model.modules() for owner in type(module).__mro__}:
        original = owner.__dict__.get(_METHOD)
        if original is not None and owner not in _originals:
            _originals[owner] = original
            setattr(owner, _METHOD, _handing_on(original, hands_on))


def restore() -> None:
    """Give all classes their own method back. Doing it twice is harmless."""
    for owner, original in _originals.items():
        setattr(owner, _METHOD, original)
    _originals.clear()


def expand(module: nn.Module, *arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[B, H, n, nope + rope]`` and values ``[B, H, n, v]``, as transformers makes them.

    Args:
        module: the attention of a layer.
        *arguments: latents ``[B, 1, n, R]`` and rotated keys ``[B, 1, n, rope]``.
    """
    method: Any = getattr(type(module), _METHOD)
    original: Expand = getattr(method, "__wrapped__", method)
    return original(module, *arguments)


def _handing_on(original: Expand, hands_on: Callable[[torch.Tensor], bool]) -> Expand:
    @functools.wraps(original)
    def expand_kv(
        self: nn.Module, kv_nope: torch.Tensor, k_rot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (kv_nope, k_rot) if hands_on(kv_nope) else original(self, kv_nope, k_rot)

    return expand_kv
