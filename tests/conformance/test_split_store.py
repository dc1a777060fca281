"""Methods x modes with rows split between device and host: the same as full attention.

The suite's prompts are short, so pages are short here too, and the budget is half of what the
first block of a layer takes: every cache ends with rows in both places.
"""

from __future__ import annotations

from typing import Any

import pytest

from hf_kvret import RetrievalCache, registered_methods
from hf_kvret.contracts.store import FirstRows
from hf_kvret.stores import PagedStore, Store
from hf_kvret.stores.memory import SplitMemory

from .cases import TELLING_MODES, ArtifactOptions, can_go_back, check_case

METHODS = ("flat", "paris", "lrqk", "ctkvr", "a2ats", "h2o")
# Plain rope; soft cap and sliding; sinks and experts; a linear hybrid.
MODELS = ("llama", "gemma2", "gpt_oss", "qwen3_next")
PAGE_LEN = 8
# A page of each of three sequences, where a prompt in chunks begins with a block of a few tokens.
LEAST_BUDGET = 9000


def _split_cache(method: str, log: list[PagedStore]) -> type[RetrievalCache]:
    """The cache of ``method`` with short pages, half of its first block on the device."""
    cache_class: Any = registered_methods()[method]

    class SplitCache(cache_class):
        @classmethod
        def make_store(cls, options: Any, layer: int, stores: Any, first: FirstRows) -> Store:
            store = super().make_store(options, layer, stores, first)
            assert isinstance(store, PagedStore) and isinstance(store.memory, SplitMemory)
            store.page_len = PAGE_LEN
            store.memory.budget = max(LEAST_BUDGET, first.nbytes // 2)
            log.append(store)
            return store

    return SplitCache


@pytest.mark.allowed(when=can_go_back, meet=[])
@pytest.mark.factor("method", METHODS)
@pytest.mark.factor("mode", (*TELLING_MODES, "prefix_reuse"))
@pytest.mark.factor("model", MODELS)
def test_same_as_full_attention(
    model: str, mode: str, method: str, artifact_options: ArtifactOptions
) -> None:
    stores: list[PagedStore] = []
    cache_class = _split_cache(method, stores)
    options = {**artifact_options(method, model), "device_budget": "1GB"}
    check_case(cache_class, model, mode, "split", options)
    filled = [store for store in stores if len(store)]
    assert filled and all(0.0 < store.bus_share < 1.0 for store in filled)
    assert all(store.nbytes() > store.host_nbytes() > 0 for store in filled)
