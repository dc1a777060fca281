"""Models x modes x methods x stores x rests: the same text and logits as full attention.

By default every method meets every store, every ``rest`` and the modes that tell most; each other
mode and each other model runs once. Most other pairs, and presets, are slow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hf_kvret import A2ATSCache, AquaKVCache, CTkvrCache, FlatKVCache, LRQKCache, RetrievalCache
from hf_kvret.methods.a2ats import A2ATSConfig
from hf_kvret.methods.ctkvr import CTkvrConfig
from hf_kvret.methods.lrqk import LRQKConfig
from hf_kvret.testing import COVERING_OPTIONS, MODELS, MODES
from hf_kvret.testing.scenario import prompt
from hf_kvret.testing.tape import taped

from ..pairs import pairwise
from .cases import (
    RESTS,
    STORES,
    TELLING_MODES,
    ArtifactOptions,
    caches,
    check_case,
    is_served,
    name_of,
    named_cases,
)

CACHES: dict[str, Callable[..., RetrievalCache]] = {
    **caches("flat", "paris", "lrqk", "ctkvr", "a2ats", "h2o", "aqua"),
    "lrqk_paper": partial(LRQKCache, options=LRQKConfig.preset("paper")),
    "ctkvr_paper": partial(CTkvrCache, options=CTkvrConfig.preset("paper")),
    "aqua_codec": partial(AquaKVCache, bits=16, predictor="none"),
    "a2ats_paper": partial(A2ATSCache, options=A2ATSConfig.preset("paper")),
}
TELLING_MODELS = ("llama", "gemma2", "gpt_oss", "qwen3")
# Modes that transformers' own cache lacks.
_ROWS = {"reset_other_batch", "batch_repeat_interleave", "batch_select_indices"}
IMPOSSIBLE: dict[str, set[str]] = {
    **{name: {"early_exit"} for name in ("gpt_oss", "gpt_neox", "gpt2", "exaone4", "gemma4")},
    "qwen2_vl": {"early_exit", "guidance"},
    "lfm2": {"early_exit", *_ROWS},
    "qwen3_next": {"assisted", "prompt_lookup", "early_exit", "crop_small", "crop_deep", *_ROWS},
}


def _possible(case: dict[str, Any]) -> bool:
    """Whether a method keeps rows in such a store, and transformers' own cache has the mode."""
    return is_served(case) and case.get("mode") not in IMPOSSIBLE.get(case.get("model", ""), ())


def default_cases() -> list[dict[str, Any]]:
    """Each method in each mode that tells much; other modes on other models, by what is quick."""
    either = {"store": STORES, "rest": list(RESTS)}
    telling = {
        "model": TELLING_MODELS,
        "mode": TELLING_MODES,
        "method": [name for name in CACHES if "_" not in name],
        **either,
    }
    others = {
        "model": [name for name in MODELS if name not in TELLING_MODELS],
        "mode": [name for name in MODES if name not in TELLING_MODES],
        "method": ("flat", "paris", "lrqk", "ctkvr", "h2o"),
        **either,
    }
    meet = [("method", name) for name in ("mode", "store", "rest")]
    return [*pairwise(telling, _possible, meet), *pairwise(others, _possible, meet=[])]


# At 16 bits the outcome is that of full attention; what fewer bits lose is held by the tests of
# stores. Heads of qwen3 have 24 dims, which 8 divides.
CODED = (
    ("llama", "beams_ragged", "flat", "higgs"),
    ("qwen3", "chunked_prefill", "paris", "higgs-host"),
    ("gemma2", "crop_deep", "lrqk", "higgs-host"),
    ("gpt_oss", "second_turn_ragged", "ctkvr", "higgs"),
    ("llama", "prompt_lookup", "a2ats", "higgs-host"),
)


def _check(case: dict[str, Any], artifact_options: Callable[..., dict[str, Any]]) -> None:
    model, method = case["model"], case["method"]
    # The codec alone has no use for an artifact.
    learned = {} if method == "aqua_codec" else artifact_options(method.split("_")[0], model)
    options = {**learned, **RESTS[case.get("rest", "nothing")]}
    may_skip = IMPOSSIBLE.get(model, ())
    check_case(CACHES[method], model, case["mode"], case["store"], options, may_skip)


@pytest.mark.parametrize("case", [*default_cases(), *named_cases(CODED)], ids=name_of)
def test_same_as_full_attention(case: dict[str, Any], artifact_options: ArtifactOptions) -> None:
    _check(case, artifact_options)


BORROWED = {
    "model": TELLING_MODELS,
    "mode": TELLING_MODES,
    "method": ("flat", "paris", "lrqk", "ctkvr", "a2ats"),
    "store": STORES,
    "rest": list(RESTS),
}


@pytest.mark.parametrize("case", pairwise(BORROWED, _possible, meet=[]), ids=name_of)
def test_borrowing_is_the_same(case: dict[str, Any], artifact_options: ArtifactOptions) -> None:
    _check(case, lambda *names: {**artifact_options(*names), "select_every": 2})


@pytest.mark.slow
@pytest.mark.allowed(when=_possible)
@pytest.mark.factor("rest", list(RESTS))
@pytest.mark.factor("store", STORES)
@pytest.mark.factor("method", list(CACHES))
@pytest.mark.factor("mode", list(MODES))
@pytest.mark.factor("model", list(MODELS))
def test_all_are_the_same_as_full_attention(
    model: str, mode: str, method: str, store: str, rest: str, artifact_options: ArtifactOptions
) -> None:
    case = {"model": model, "mode": mode, "method": method, "store": store, "rest": rest}
    _check(case, artifact_options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
def test_replayed_steps_are_the_same(mode: str) -> None:
    """Where generate can, steps are captured, and their kernels run in Triton's interpreter."""
    with taped():
        check_case(FlatKVCache, "llama", mode, "device", {}, ())


def test_a_model_that_served_a_retrieval_cache_gives_the_same_text_without_one(model: Any) -> None:
    greedy = {"max_new_tokens": 8, "do_sample": False}
    before = model.generate(prompt(1, 60), **greedy)
    model.generate(
        prompt(1, 60), past_key_values=FlatKVCache(model.config, **COVERING_OPTIONS), **greedy
    )
    assert torch.equal(model.generate(prompt(1, 60), **greedy), before)
