"""Modes x methods x stores x models on a GPU: the same text and logits as full attention there."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_kvret import NativeKVCache
from hf_kvret.testing import GEMMA4_MODELS, LATENT_MODELS, MODELS, MODES
from hf_kvret.testing.indexed_models import known_indexed

from .cases import RESTS, ArtifactOptions, caches, can_go_back, check_case, is_served

if not torch.cuda.is_available():
    # Hundreds of cases would be made to be skipped.
    pytest.skip("no CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu
CACHES = caches("flat", "paris", "lrqk", "ctkvr", "a2ats", "h2o", "aqua")
STORES = ("device", "host", "resident", "cpu", "higgs", "higgs-host")
SOME_MODES = ("greedy_ragged", "beams", "prompt_lookup", "second_turn", "loop")
# Those that this transformers has.
OTHERS = [
    name
    for name in (*MODELS, *LATENT_MODELS, *GEMMA4_MODELS)
    if name != "llama" and (name != "bailing_hybrid" or name in CONFIG_MAPPING)
]


def _possible(case: dict[str, Any]) -> bool:
    return is_served(case) and can_go_back(case)


@pytest.mark.allowed(when=_possible)
@pytest.mark.factor("rest", list(RESTS))
@pytest.mark.factor("store", STORES)
@pytest.mark.factor("method", list(CACHES))
@pytest.mark.factor("mode", list(MODES))
def test_a_llama_gives_the_text_of_full_attention(
    mode: str, method: str, store: str, rest: str, artifact_options: ArtifactOptions
) -> None:
    options = {**artifact_options(method, "llama"), **RESTS[rest]}
    check_case(CACHES[method], "llama", mode, store, options, device="cuda")


@pytest.mark.allowed(when=can_go_back)
@pytest.mark.factor("store", ("device", "host"))
@pytest.mark.factor("method", ("flat", "paris", "lrqk"))
@pytest.mark.factor("mode", SOME_MODES)
@pytest.mark.factor("model", OTHERS)
def test_other_models_give_the_text_of_full_attention(
    model: str, mode: str, method: str, store: str, artifact_options: ArtifactOptions
) -> None:
    options = artifact_options(method, model)
    check_case(CACHES[method], model, mode, store, options, device="cuda")


@pytest.mark.parametrize("store", ["device", "resident"])
@pytest.mark.parametrize("mode", ["greedy", "second_turn", "crop_small"])
@pytest.mark.parametrize("model", known_indexed())
def test_models_with_an_indexer_give_their_own_text(model: str, mode: str, store: str) -> None:
    check_case(NativeKVCache, model, mode, store, {"top_k": None}, device="cuda")
