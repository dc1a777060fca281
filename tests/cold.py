"""Cold tokens for tests that drive an index without a model and without a store."""

import torch

from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.stores import PagedStore, Store
from hf_kvret.stores.memory import DeviceMemory


def cold_tokens(
    valid: torch.Tensor,
    scale: float,
    budget: int,
    softcap: float | None = None,
    store: Store | None = None,
) -> ColdTokens:
    """Tokens for ``Index.search``, of which ``valid [B, n]`` may be selected.

    Without ``store`` an empty one, for indexes that read none.
    """
    if store is None:
        store = PagedStore(DeviceMemory(valid.device))
    return ColdTokens(store, Scoring(valid, scale, softcap), budget)
