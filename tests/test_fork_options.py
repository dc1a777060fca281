"""Options that a filled cache may change reach every part of it, by a fork or by a load."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_kvret import (
    A2ATSCache,
    AquaKVCache,
    CTkvrCache,
    FlatKVCache,
    H2OCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
    attach,
)
from hf_kvret.methods.a2ats import A2ATSConfig
from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.lrqk import LRQKConfig
from hf_kvret.testing import COVERING_OPTIONS, LOGIT_TOLERANCE, MODELS
from hf_kvret.testing.scenario import prompt

CACHES: dict[str, Callable[..., RetrievalCache]] = {
    "flat": FlatKVCache,
    "paris": ParisKVCache,
    "lrqk": LRQKCache,
    "lrqk_paper": partial(LRQKCache, options=LRQKConfig.paper()),
    "ctkvr": CTkvrCache,
    "ctkvr_paper": partial(CTkvrCache, options=CTkvrConfig.paper()),
    "a2ats": A2ATSCache,
    "a2ats_paper": partial(A2ATSCache, options=A2ATSConfig.paper()),
    "h2o": H2OCache,
    "h2o_observed": partial(H2OCache, observed=8),
    "aqua": partial(AquaKVCache, bits=16),
    "aqua_codec": partial(AquaKVCache, bits=16, predictor="none"),
}
SMALL = {**COVERING_OPTIONS, "prefill_chunk": None, "track_recall": False, "graph": "auto"}
LARGE: dict[str, Any] = {
    "top_k": 1.0,
    "max_draft": 100,
    "flush": 11,
    "prefill_chunk": 200,
    "track_recall": True,
    "graph": False,
}
FREE = set(LARGE)
# Single tokens, a small and a large draft, a second prompt, and a draft after it.
PASSES = (1, 1, 5, 96, 1, 120, 1, 40, 1, 1)
ArtifactOptions = Callable[[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    model = MODELS["llama"].build()
    attach(model)
    return model


def _read(model: Any, cache: RetrievalCache, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def _go_on(model: Any, cache: RetrievalCache, first: int) -> torch.Tensor:
    """Logits of ``PASSES`` over the tokens from ``first`` on."""
    parts = prompt(1, first + sum(PASSES))[:, first:].split(PASSES, dim=1)
    return torch.cat([_read(model, cache, part) for part in parts], dim=1)


# Nothing is cold; the last pass made tokens cold; some steps came after it.
@pytest.mark.factor("passes", [(12,), (60,), (60, 1, 1, 6, 1)], ids=str)
@pytest.mark.factor("towards", ["large", "small"])
@pytest.mark.factor("name", list(CACHES))
def test_a_cache_goes_on_like_one_that_always_had_the_options(
    llama: PreTrainedModel,
    name: str,
    towards: str,
    passes: tuple[int, ...],
    artifact_options: ArtifactOptions,
    tmp_path: Path,
) -> None:
    before, after = (SMALL, {**SMALL, **LARGE})[:: 1 if towards == "large" else -1]
    changes = {option: after[option] for option in FREE}
    artifact = {} if name == "aqua_codec" else artifact_options(name.split("_")[0], "llama")
    made = [CACHES[name](config=llama.config, **options, **artifact) for options in (before, after)]
    ids = prompt(1, sum(passes))
    for cache in made:
        for part in ids.split(passes, dim=1):
            _read(llama, cache, part)
    made[0].save_pretrained(tmp_path)
    fork = made[0].fork(**changes)
    loaded = type(made[0]).from_pretrained(tmp_path, llama.config, **changes, **artifact)
    want = _go_on(llama, made[1], len(ids[0]))
    for cache in (fork, loaded):
        got = _go_on(llama, cache, len(ids[0]))
        torch.testing.assert_close(got, want, rtol=0, atol=LOGIT_TOLERANCE)
        assert cache.stats()["layers"][0]["cold_tokens"] > 0
