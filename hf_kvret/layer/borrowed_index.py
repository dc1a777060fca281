"""One selection for several layers: a layer attends to the tokens that one below it selected.

With ``select_every=k`` retrieval layers stand in groups of k. The first layer of a group selects;
the others take its token indices of the same step, and attend to their own rows of these.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_kvret.contracts.block import TokenBlock
from hf_kvret.contracts.index import CapturableIndex, ColdTokens, Index, SearchCost
from hf_kvret.layer.step import StepRecord, Subscriber


class Lender(Subscriber):
    """A subscriber of a layer that selects: it keeps the tokens for the layers that borrow them.

    Attributes:
        number: of the layer in the model.
        ids: ``[B, H, Q, K]`` int32 of the newest step, as ``Index.search`` returns them; None: no
            step was taken.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.ids: torch.Tensor | None = None

    def __call__(self, record: StepRecord) -> None:
        self.ids = record.ids

    def reset(self) -> None:
        self.ids = None


class BorrowedIndex(CapturableIndex, Index):
    """Names what the layer of ``lender`` selected in the same step, and holds nothing itself."""

    def __init__(self, lender: Lender) -> None:
        self.lender = lender

    def add(self, block: TokenBlock) -> None:
        """Nothing: the lender's layer has an index of the same tokens."""

    def search(self, query: torch.Tensor, cold: ColdTokens) -> torch.Tensor:
        ids = self.lender.ids
        assert ids is not None, "the lender's layer stands below, and has the same tokens"
        # Layers may lie on several devices.
        return ids.to(query.device)

    def cost(self, n: int, budget: int) -> SearchCost:
        """Nothing is scored, and nothing read."""
        return SearchCost(0, 0)

    def stats(self) -> dict[str, Any]:
        """The number of the layer that selects."""
        return {"selected_by": self.lender.number}
