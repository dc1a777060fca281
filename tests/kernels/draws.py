"""Random numbers that depend on a seed alone, and their place on a device."""

from __future__ import annotations

import torch


def generator(seed: int) -> torch.Generator:
    """One on the CPU that begins at ``seed``."""
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers of ``dtype``."""
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def on(place: tuple[str, str], x: torch.Tensor | None) -> torch.Tensor | None:
    """``x`` on the device of a place."""
    return None if x is None else x.to(place[1])


def moved_with_room(rows: torch.Tensor, device: str) -> torch.Tensor:
    """A view's whole buffer moves: moving the view alone would lose its spare room."""
    room = torch.empty_strided(
        (rows.untyped_storage().nbytes() // rows.element_size(),), (1,), dtype=rows.dtype
    ).set_(rows.untyped_storage())
    return room.to(device).as_strided(rows.shape, rows.stride(), rows.storage_offset())
