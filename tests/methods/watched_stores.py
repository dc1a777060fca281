"""Stores that watch how they are read, and random rows to put into them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.stores import PagedStore
from hf_kvret.stores.memory import DeviceMemory


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ragged(batch: int, count: int) -> torch.Tensor:
    """Validity ``[B, n]`` with padding in the last sequence and a hole in the first."""
    valid = torch.ones(batch, count, dtype=torch.bool)
    valid[-1, : count // 2] = False
    valid[0, count // 3 : count // 3 + count // 10] = False
    return valid


def slot_sets(ids: torch.Tensor) -> list[set[int]]:
    """The slots that ``ids [..., k]`` name, a set for each selection; no slot comes twice."""
    selections = [ids_of[ids_of >= 0].tolist() for ids_of in ids.flatten(0, -2)]
    assert all(len(set(slots)) == len(slots) for slots in selections), "a slot twice"
    return [set(slots) for slots in selections]


def slot_sets_of(marks: torch.Tensor) -> list[set[int]]:
    """The slots where ``marks [..., n]`` are True, a set for each row."""
    return [set(row.nonzero().flatten().tolist()) for row in marks.flatten(0, -2)]


def overlap(ids: torch.Tensor, best: torch.Tensor) -> float:
    """Share of the ``ids [..., k]`` that are among the ``best [..., k]``."""
    return float((ids.unsqueeze(-1) == best.unsqueeze(-2)).any(-1).float().mean())


def store_of(keys: torch.Tensor) -> PagedStore:
    """A store of ``keys [B, H, n, D]``, which are their own values."""
    store = PagedStore(DeviceMemory(keys.device))
    store.append(TokenBlock(keys, keys, 0))
    return store


class WatchedStore(PagedStore):
    """A store that counts how often all keys are read, and lets nobody read while ``closed``."""

    closed = False
    readings = 0

    def chunks(
        self, chunk_len: int = 4096, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        assert not self.closed, "keys were read from the store"
        return super().chunks(chunk_len, stop)

    def key_chunks(self, chunk_len: int = 4096) -> Iterator[tuple[int, torch.Tensor]]:
        assert not self.closed, "keys were read from the store"
        self.readings += 1
        return super().key_chunks(chunk_len)
