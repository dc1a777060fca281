"""Cold tokens for tests that drive an index without a model."""

from __future__ import annotations

import torch

from hf_kvret.index import ColdTokens
from hf_kvret.stores import Store


def all_valid(
    store: Store,
    batch: int,
    *,
    budget: int = 1,
    scale: float = 1.0,
    softcap: float | None = None,
) -> ColdTokens:
    """All tokens of a store on the CPU, for ``Index.build`` and ``refresh``; none is padding."""
    valid = torch.ones(batch, len(store), dtype=torch.bool)
    return ColdTokens(store, valid, scale, softcap, budget)
