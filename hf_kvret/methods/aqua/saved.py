"""Checks of saved codes, before a store takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_kvret.contracts.schema import Form, damaged
from hf_kvret.contracts.state import Tensors
from hf_kvret_kernels.higgs import Codec


def check_names(state: Tensors, names: set[str]) -> None:
    """ValueError for a tensor of another name."""
    if not state.keys() <= names:
        raise damaged(f"store has an unknown {min(state.keys() - names)[:80]}")


def check_shape(saved: torch.Tensor, shape: list[int]) -> None:
    """ValueError unless ``saved``, ``store.shape``, is the layer's: heads, key and value dim."""
    if saved.dtype != torch.int64 or saved.shape != (len(shape),) or saved.tolist() != shape:
        raise damaged(f"store.shape is {saved.flatten()[:4].tolist()}, not {shape}")


def check_coded(
    state: Tensors,
    form: Form,
    sides: Sequence[tuple[Codec, int]],
    tokens: str = "N",
    prefix: str = "",
) -> None:
    """ValueError unless codes and scales are of rows that ``sides``, in that order, make up.

    Args:
        state: with ``keys``, the codes, and ``values``, the scales.
        form: of the layer.
        sides: codec and numbers of each side of a row.
        tokens: letter or number of the rows.
        prefix: of the names.
    """
    widths = {
        "keys": sum(codec.code_bytes(width) for codec, width in sides),
        "values": sum(codec.scale_bytes(width) for codec, width in sides),
    }
    for name, width in widths.items():
        key = f"{prefix}{name}"
        form.check(f"store.{key}", state[key], f"B 1 {tokens} {width}", torch.uint8)
