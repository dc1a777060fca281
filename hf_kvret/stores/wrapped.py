"""WrappedStore: a store that keeps its rows in another one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.state import part
from hf_kvret.contracts.store import Store
from hf_kvret.stores.paged import PagedStore


class WrappedStore(Store):
    """Delegates to the paged store inside it; subclasses override parts."""

    rows: PagedStore = part(key="")

    def __init__(self, rows: PagedStore) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bus_share(self) -> float:
        return self.rows.bus_share

    def expect(self, tokens: int) -> None:
        self.rows.expect(tokens)

    def append(self, block: TokenBlock) -> None:
        self.rows.append(block)

    def gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows.gather(ids)

    def chunks(
        self, piece_len: int = 4096, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        return self.rows.chunks(piece_len, stop)

    def before_capture(self) -> None:
        self.rows.before_capture()

    @property
    def capture_obstacle(self) -> str | None:
        return self.rows.capture_obstacle
