"""Options of absorbed attention to all tokens: those of passes alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hf_kvret import (
    LatentKVCache,
)
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.methods.latent import LatentConfig
from hf_kvret.testing import LATENT_MODELS

MEANINGLESS: dict[str, Any] = {
    "top_k": 64,
    "sink": 2,
    "recent": 16,
    "flush": 8,
    "dense_below": 0,
    "store": "host",
    "slots": 2.0,
    "bits": 2,
    "device_budget": "1GB",
    "track_recall": True,
    "prompt": "retrieve",
    "rest": "mean",
    "lossless": True,
}
# Refused by what they need, which has no meaning here either.
DEPENDENT = ("rest_blocks", "disk")
PASSES: dict[str, Any] = {"max_draft": 6, "prefill_chunk": 64, "graph": False}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_an_option_of_retrieval_is_refused_with_the_way_out(name: str) -> None:
    value = MEANINGLESS[name]
    remedy = rf"^{name}={value!r} has no meaning: .*leave it out.*cache_implementation='flat'"
    with pytest.raises(ValueError, match=remedy):
        LatentConfig.from_options(**{name: value})
    config = LATENT_MODELS["deepseek_v3"].config()
    with pytest.raises(ValueError, match=remedy):
        LatentKVCache(config, **{name: value})
    with pytest.raises(ValueError, match=f"^{name}="):
        LatentConfig().replace(**{name: value})


def test_options_of_passes_and_defaults_are_taken() -> None:
    defaults = dataclasses.asdict(LatentConfig())
    assert {*defaults} == {*MEANINGLESS, *PASSES, *DEPENDENT}
    options = LatentConfig.from_options(**defaults | PASSES)
    assert {name: getattr(options, name) for name in PASSES} == PASSES
    assert options.exact() == options
    assert LatentConfig.from_options(**dataclasses.asdict(options)) == options


def test_what_was_asked_for_all_caches_is_not_for_this_one() -> None:
    options = choose_cache("latent", {"top_k": 64, "store": "host", "max_draft": 3}).options
    assert options == LatentConfig(max_draft=3)
    with pytest.raises(ValueError, match="top_k=64"):
        choose_cache("latent:top_k=64")
