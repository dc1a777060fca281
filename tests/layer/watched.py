"""What an index was asked, for tests of what is not selected."""

from __future__ import annotations

import pytest
import torch

from hf_kvret.contracts.index import ColdTokens, Index

from .test_block_sums import Driver, on


class Watched:
    """A driver that remembers what its index was asked in the last pass."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.query = torch.empty(0)
        self.cold: ColdTokens | None = None

    def forward(self, count: int, padded: int = 0) -> torch.Tensor:
        kv = self.driver.layer.kv
        index = None if kv is None else kv.index
        with pytest.MonkeyPatch.context() as patch:
            if index is not None:
                search = index.search

                def watch(query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
                    self.query, self.cold = query, cold
                    return search(query, cold)

                patch.setattr(index, "search", watch)
            with on("torch"):
                return self.driver.forward(count, padded)

    @property
    def index(self) -> Index:
        kv = self.driver.layer.kv
        assert kv is not None and kv.index is not None
        return kv.index

    def asked(self) -> tuple[torch.Tensor, ColdTokens]:
        assert self.cold is not None, "the last pass searched"
        return self.query, self.cold
