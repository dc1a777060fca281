"""Cold tokens for tests that drive an index without a model."""

from __future__ import annotations

import torch

from hf_kvret.contracts.index import ColdTokens, Scoring
from hf_kvret.layer.layer_kv import LayerKV
from hf_kvret.stores import PagedStore, Store
from hf_kvret.stores.memory import DeviceMemory


def all_valid(
    store: Store,
    batch: int,
    *,
    budget: int = 1,
    scale: float = 1.0,
    softcap: float | None = None,
) -> ColdTokens:
    """All tokens of a store on the CPU, for ``Index.build`` and ``search``; none is padding."""
    valid = torch.ones(batch, len(store), dtype=torch.bool)
    return ColdTokens(store, Scoring(valid, scale, softcap), budget)


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


def held_tokens(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys ``[B, Hkv, n, Dk]`` and values that a layer holds, in the order of their slots."""
    chunks = [] if kv.store is None else list(kv.store.chunks())
    end = 0
    for start, keys, _ in chunks:
        assert start == end, f"a chunk starts at slot {start}, the one before ends at {end}"
        end += keys.shape[2]
    assert end == kv.window.start, "the window goes on where the store ends"
    keys, values = kv.window.recent()
    return (
        torch.cat([*(cold_keys for _, cold_keys, _ in chunks), keys], dim=2),
        torch.cat([*(cold_values for _, _, cold_values in chunks), values], dim=2),
    )
