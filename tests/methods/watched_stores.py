"""Stores that watch how they are read, and random rows to put into them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_kvret.stores import PagedStore


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class CountingStore(PagedStore):
    """A store that counts how often all keys are read."""

    readings = 0

    def key_chunks(self, chunk_len: int = 4096) -> Iterator[tuple[int, torch.Tensor]]:
        self.readings += 1
        return super().key_chunks(chunk_len)


class GuardedStore(PagedStore):
    """A store that may be told to let nobody read."""

    closed = False

    def chunks(
        self, chunk_len: int = 4096, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        assert not self.closed, "keys were read from the store"
        return super().chunks(chunk_len, stop)

    def key_chunks(self, chunk_len: int = 4096) -> Iterator[tuple[int, torch.Tensor]]:
        assert not self.closed, "keys were read from the store"
        return super().key_chunks(chunk_len)
