"""The plain tensors in which weights lie that are no plain floats.

Quantized weights are packed: a parameter of integers, a subclass that holds plain tensors, or
buffers of codes and scales. Their numbers mean something to their kernel alone, so they are
compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_kvret.integration.adapters import base_buffers, base_parameters
from hf_kvret.integration.sampled_tensors import FLOATS, SAMPLED_NUMBERS, plain_parts, unreadable


def stored_tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Plain tensors that hold weights of ``module`` in another form than numbers, by name.

    Beside them, why other parameters can't be read, by name. Names are those of parameters and
    buffers, with the name of a part behind those that hold several tensors. Tensors of fewer than
    16 bytes are left out.
    """
    tensors, reasons = {}, {}
    for name, parameter in base_parameters(module).items():
        reason = unreadable(parameter)
        if not reason:
            continue
        parts = plain_parts(parameter)
        if not parts:
            reasons[name] = reason
        tensors |= {f"{name}.{part}" if part else name: one for part, one in parts.items()}
    tensors |= _packed_buffers(module)
    return {name: one for name, one in tensors.items() if one.nbytes >= SAMPLED_NUMBERS}, reasons


def _packed_buffers(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Saved buffers of modules that have one of codes, as GPTQ and AWQ keep their weights."""
    buffers: dict[str, dict[str, torch.Tensor]] = {}
    for name, buffer in base_buffers(module).items():
        if plain_parts(buffer).keys() == {""}:
            buffers.setdefault(name.rpartition(".")[0], {})[name] = buffer
    return {
        name: buffer
        for own in buffers.values()
        if any(one.dtype not in FLOATS and one.dim() > 1 for one in own.values())
        for name, buffer in own.items()
        if buffer.dtype != torch.bool
    }
