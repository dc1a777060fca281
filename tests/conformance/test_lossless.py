"""With ``lossless`` a cache that selects four rows gives full attention's own answers."""

from typing import Any

import pytest

import hf_kvret.generate.lossless as lossless_call
from hf_kvret.lossless.pace import GivenPace
from hf_kvret.testing import COVERING_OPTIONS, Case, run_case
from hf_kvret.testing.conformance import ALL_MODELS

from .cases import ArtifactOptions, caches, expect_passed

METHODS = ("flat", "paris", "lrqk", "ctkvr", "a2ats")
# One sequence in a call of generate, and the cache gone on with in every way.
MODES = ("greedy", "second_turn", "guidance", "own_position_ids", "crop_deep", "prompt_lookup")
# Sliding windows, soft caps, attention sinks, M-RoPE, experts, convolutions, recurrent states.
MODELS = ("llama", "gemma2", "gpt_oss", "qwen2_vl", "mixtral", "lfm2", "gpt2", "qwen3_next")
MODELS += ("falcon_h1",)
STORES = ("device", "host", "resident", "cpu")
# One of each family that is served or refused for a reason of its own.
FAMILIES = ("gemma4", "zamba2", "deepseek_v3", "gemma3n", "deepseek_v32")


def _read_everything(cache: Any) -> bool:
    """Some cold rows were read by exact passes."""
    return any(layer["exact_rows"] for layer in cache.stats()["layers"])


@pytest.mark.allowed(meet=[])
@pytest.mark.factor("every", [1, 2])
@pytest.mark.factor("drafts", [1, 5, 32])
@pytest.mark.factor("store", STORES)
@pytest.mark.factor("method", METHODS)
@pytest.mark.factor("mode", MODES)
@pytest.mark.factor("model", MODELS)
def test_same_as_full_attention(
    model: str,
    mode: str,
    method: str,
    store: str,
    drafts: int,
    every: int,
    artifact_options: ArtifactOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lossless_call, "_pace", lambda *arguments: GivenPace(drafts, None))
    options = {**COVERING_OPTIONS, "top_k": 4, "max_draft": 32, "lossless": True, "store": store}
    options |= {"select_every": every, **artifact_options(method, model)}
    make = caches(method)[method]
    result = run_case(
        Case(model, mode), lambda built: make(built.config, **options), proof=_read_everything
    )
    expect_passed(result)


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow) for name in ALL_MODELS],
)
def test_every_model_is_served_or_refused_with_a_reason(model: str) -> None:
    options = {**COVERING_OPTIONS, "top_k": 4, "lossless": True}
    make = caches("flat")["flat"]
    try:
        result = run_case(
            Case(model, "greedy"),
            lambda built: make(built.config, **options),
            proof=_read_everything,
        )
    except ValueError as error:
        assert "lossless=True: its linear layers" in str(error) or "native" in str(error)
    else:
        assert result.status != "failed", result.detail
