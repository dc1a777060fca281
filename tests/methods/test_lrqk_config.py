"""LRQK's options, and the cache as a whole on a small model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret import LRQKCache
from hf_kvret.methods.lrqk import LRQKConfig
from hf_kvret.testing import COVERING_OPTIONS

SMALL: dict[str, Any] = {**COVERING_OPTIONS, "top_k": 12, "rank": 8}
GREEDY = {"do_sample": False}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"proxy_dtype": "int8"},
    {"factors": "als", "fit_recent": 4},
]


def test_the_rank_follows_the_head_dim_unless_it_is_given() -> None:
    assert [LRQKConfig().rank_of(dim) for dim in (16, 32, 128)] == [16, 32, 32]
    assert LRQKConfig(rank=40).rank_of(64) == 40
    with pytest.raises(ValueError, match=r"rank=40 is above the head dim 32.*1 to 32, or None"):
        LRQKConfig(rank=40).rank_of(32)


def test_the_papers_options_are_those_of_its_section_5() -> None:
    paper = LRQKConfig.preset("paper")
    assert (paper.factors, paper.top_k, paper.iterations) == ("als", 2048, 2)
    # The paper's lite tokens.
    assert (paper.recent, paper.fit_recent) == (64, 64)
    assert (paper.penalty, paper.rank_of(128)) == (1.0, 32)
    assert LRQKConfig.preset("paper", top_k=1024, rank=16).top_k == 1024
    assert LRQKConfig().factors == "closed" and LRQKConfig().top_k is None


def _prompt(length: int = 60, batch: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ragged where there are two rows."""
    ids = torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[1, :17], mask[1, :17] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _cache(model: PreTrainedModel, **changes: Any) -> LRQKCache:
    return LRQKCache(model.config, **{**SMALL, **changes})


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_kv_head_selects_or_each_query_head_with_als(
    llama: PreTrainedModel, variant: dict[str, Any]
) -> None:
    cache = _cache(llama, **variant)
    llama.generate(**_prompt(), **GREEDY, max_new_tokens=12, past_key_values=cache)
    heads = 4 if variant.get("factors") == "als" else 2
    for layer in cache.stats()["layers"]:
        assert (layer["steps"], layer["selected"]) == (11, 11 * 2 * heads * 12)


def test_a_rank_above_the_head_dim_or_that_of_kernels_is_refused_at_once(
    llama: PreTrainedModel,
) -> None:
    with pytest.raises(ValueError, match=r"rank=17 is above the head dim 16.*or None"):
        _cache(llama, rank=17)
    config = copy.deepcopy(llama.config)
    config.head_dim = 512
    with pytest.raises(ValueError, match=r"rank=300.* or above 256.*choose 1 to 256"):
        LRQKCache(config, rank=300)


def test_a_cache_saved_while_dense_knows_what_it_watched(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    """Nothing is cold yet, but the queries of the prompt were seen."""
    hf_kvret.attach(llama)
    tokens = torch.randint(1, 100, (1, 160), generator=torch.Generator().manual_seed(5))
    cache = _cache(llama, rank=8, factors="als", dense_below=100, top_k=12)
    with torch.no_grad():
        llama(tokens[:, :99], past_key_values=cache)
        cache.save_pretrained(tmp_path)
        loaded = LRQKCache.from_pretrained(tmp_path, config=llama.config)
        for step in range(99, 160):
            logits = [
                llama(tokens[:, step : step + 1], past_key_values=one).logits
                for one in (cache, loaded)
            ]
            torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    assert all(layer["selected"] for layer in loaded.stats()["layers"])
