"""Options of absorbed attention to all tokens: those of passes alone."""

import dataclasses
from typing import Any

import pytest

from hf_kvret import LatentKVCache
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.methods.latent import LatentConfig
from hf_kvret.testing import LATENT_MODELS

MEANINGLESS: dict[str, Any] = {
    "top_k": 64, "select_every": 2, "sink": 2, "recent": 16, "flush": 8, "dense_below": 0,
    "store": "host", "slots": 2.0, "bits": 2, "track_recall": True, "prompt": "retrieve",
    "rest": "mean", "lossless": True, "disk": "rows",
}  # fmt: skip
PASSES: dict[str, Any] = {
    "max_draft": 6, "prefill_chunk": 64, "graph": False, "compile": False,
    "snapshots": 0, "snapshot_every": 64, "on_divergence": "crop",
}  # fmt: skip


def test_options_of_retrieval_are_refused_with_the_way_out_and_those_of_passes_taken() -> None:
    assert {*dataclasses.asdict(LatentConfig())} == {*MEANINGLESS, *PASSES}
    config = LATENT_MODELS["deepseek_v3"].config()
    for name, value in MEANINGLESS.items():
        remedy = rf"^{name}={value!r}: it has no meaning.*leave it out.*cache_implementation='flat'"
        with pytest.raises(ValueError, match=remedy):
            LatentConfig.from_options(**{name: value})
        with pytest.raises(ValueError, match=remedy):
            LatentKVCache(config, **{name: value})
    options = LatentConfig.from_options(**dataclasses.asdict(LatentConfig()) | PASSES)
    assert {name: getattr(options, name) for name in PASSES} == PASSES
    assert options.exact() == options


def test_options_asked_for_all_caches_are_not_for_this_one() -> None:
    options = choose_cache("latent", {"top_k": 64, "store": "host", "max_draft": 3}).options
    assert options == LatentConfig(max_draft=3)
    with pytest.raises(ValueError, match="top_k=64"):
        choose_cache("latent:top_k=64")
