"""AquaIndex: nothing to choose; the first layer notes the positions of recent tokens."""

from __future__ import annotations

from typing import NoReturn

import torch

from hf_kvret.core.block import TokenBlock
from hf_kvret.core.index import ColdTokens, Index, SearchCost
from hf_kvret.core.state import number, tensor
from hf_kvret.methods.aqua.learned import LearnedLayer, learned_layer
from hf_kvret.methods.aqua.plan import LayerPlan

UNKNOWN = -(2**31)
"""In place of a position that the store knows: of a token that a crop brought back."""


class AquaIndex(Index):
    """All cold tokens are attended to.

    Where keys are coded before RoPE, the index of the first layer notes the positions of recent
    tokens, 4 bytes each, and tells them to the store when they leave the window.

    Args:
        plan: of the layer.
    """

    whole = True
    capture_obstacle = "aqua notes the position of each token at a place that the host keeps"

    # Positions [B, n] int32 of the slots from _start on.
    _noted: torch.Tensor | None = tensor(key="positions", shared=True)
    _start: int = number(0)

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self._learned: LearnedLayer | None = None

    def on_forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        start: int,
        valid: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> None:
        plan = self.plan
        if plan.found is not None and self._learned is None:
            predicted = plan.previous is not None
            self._learned = learned_layer(
                plan.found, plan.layer, predicted, keys.device, keys.dtype
            )
        if not plan.keeps_positions:
            return
        if positions is None:
            raise ValueError(
                "this model does not tell its attention the positions of tokens, and keys are "
                "coded before RoPE: pass position_ids to the model, use predictor='none', or an "
                "artifact made with `hf-kvret calibrate aqua --space after`"
            )
        new, kept = positions.to(torch.int32), max(0, start - self._start)
        if self._noted is None or not kept:
            self._start, self._noted = start, new.clone()
        else:
            self._noted = torch.cat([self._noted[:, :kept], new], dim=1)

    def positions(self, start: int, end: int) -> torch.Tensor | None:
        """``[B, end - start]`` int32, ``UNKNOWN`` for tokens that the store held before."""
        if self._noted is None:
            return None
        first, last = (max(0, slot - self._start) for slot in (start, end))
        noted = self._noted[:, first:last]
        return torch.nn.functional.pad(noted, (end - start - noted.shape[1], 0), value=UNKNOWN)

    def add(self, block: TokenBlock) -> None:
        if self._noted is not None and block.end > self._start:
            self._noted = self._noted[:, block.end - self._start :].clone()
            self._start = block.end

    def search(self, query: torch.Tensor, cold: ColdTokens) -> NoReturn:
        """Never called.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("AQUA-KV attends to all cold tokens: read them with store.chunks()")

    def cost(self, n: int, budget: int) -> SearchCost:
        """Nothing is compared, but each step reads the predictors."""
        return SearchCost(0, self.shared_nbytes())

    def crop(self, length: int) -> None:
        """Nothing: ``on_forward`` drops what was noted of tokens that are no more."""

    def shared_nbytes(self) -> int:
        """The layer's predictors."""
        return 0 if self._learned is None else self._learned.nbytes
