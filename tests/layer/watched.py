"""What an index was asked, for tests of what is not selected."""

from __future__ import annotations

import pytest
import torch

from hf_kvret.contracts.index import ColdTokens, Index

from .test_rest import Driver, on


class Watched:
    """A driver that remembers what its index was asked in the last pass."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.query = torch.empty(0)
        self.cold: ColdTokens | None = None

    def forward(self, count: int, padded: int = 0) -> torch.Tensor:
        regions = self.driver.layer.regions
        index = None if regions is None else regions.index
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
        regions = self.driver.layer.regions
        assert regions is not None and regions.index is not None
        return regions.index

    def asked(self) -> tuple[torch.Tensor, ColdTokens]:
        assert self.cold is not None, "the last pass searched"
        return self.query, self.cold
