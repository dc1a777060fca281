"""Estimates of what is not selected: the weight that they give it, samples by them, lost mass."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_kvret import (
    A2ATSCache,
    AquaKVCache,
    CTkvrCache,
    FlatKVCache,
    H2OCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
)
from hf_kvret.calibration.corpus import Corpus
from hf_kvret.calibration.runner import calibrate
from hf_kvret.core.estimates import exact_left_out, left_out_logits
from hf_kvret.core.index import ColdTokens, Estimates, Index
from hf_kvret.core.recall import exact_scores
from hf_kvret.core.sampling import priority_sample, uniforms
from hf_kvret.core.store import weighted_attention
from hf_kvret.methods.flat import FlatConfig, FlatIndex
from hf_kvret.methods.a2ats.calibrator import A2ATSCalibration
from hf_kvret_kernels.relevance import group_relevance
from hf_kvret_kernels.top_k import top_k

from .test_rest import CONFIG, ERROR, Driver, on

ALL = 10**6
METHODS: dict[str, tuple[type[RetrievalCache], dict[str, Any]]] = {
    "flat": (FlatKVCache, {}),
    "paris": (ParisKVCache, {"schedule": ((math.inf, 1.0, 0.5),)}),
    "lrqk": (LRQKCache, {"rank": 8}),
    "lrqk, each head": (LRQKCache, {"rank": 8, "shared": False}),
    "a2ats": (A2ATSCache, {}),
}
RESTS = ("index", "sample")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: Any) -> str:
    """A codebook of keys after RoPE: the driver knows no positions."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("a2ats")
    options = A2ATSCalibration(codewords=32, rounds=5, compare=False, space="rotated")
    corpus = Corpus([torch.randint(3, 99, (200,)) for _ in range(3)], 0, {"text": "random"})
    calibrate(LlamaForCausalLM(CONFIG).eval(), corpus, options, folder, progress=False)
    return str(folder)


def begun(method: str, artifact: str, **options: Any) -> Driver:
    kind, own = METHODS[method]
    if kind is A2ATSCache:
        own = {**own, "artifact": artifact}
    return Driver(kind, **own, **options)


def lived(driver: Driver) -> list[torch.Tensor]:
    """Attention of steps and drafts, with all that may happen to a cache in between."""
    driver.forward(90, padded=11)
    outs = [driver.forward(count) for count in (1, 1, 3)]
    driver.cache.crop(-3)
    driver.mask = driver.mask[:, :-3]
    outs.append(driver.forward(2))
    driver.cache.reorder_cache(torch.tensor([1, 0]))
    driver.mask = driver.mask[[1, 0]]
    outs += [driver.forward(1) for _ in range(5)]
    driver.cache.crop(-40)
    driver.mask = driver.mask[:, :-40]
    outs += [driver.forward(1) for _ in range(5)]
    driver.cache = driver.cache.fork()
    return [*outs, driver.forward(1), driver.forward(4)]


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_budget_that_covers_all_is_full_attention(
    method: str, rest: str, artifact: str
) -> None:
    plain = lived(begun(method, artifact, top_k=ALL))
    driver = begun(method, artifact, top_k=ALL, rest=rest)
    for own, expected in zip(lived(driver), plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=ERROR)
    (stats,) = driver.cache.stats()["layers"]
    assert stats["lost_mass"] == pytest.approx(0.0, abs=1e-6)
