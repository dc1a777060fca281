"""Multi-head latent attention: with a budget that covers everything, what full attention gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import transformers

from hf_kvret import (
    A2ATSCache,
    AquaKVCache,
    CTkvrCache,
    FlatKVCache,
    H2OCache,
    LatentKVCache,
    LRQKCache,
    ParisKVCache,
    RetrievalCache,
)
from hf_kvret.testing import COVERING_OPTIONS, LATENT_MODELS, MODES, Case, run_case
from hf_kvret.testing.conformance import Result, no_proof
from hf_kvret.testing.pairs import pairwise

# Of methods that learn from calibration; aqua's rows are its own codes, here at 16 bits.
LEARNED: dict[str, Callable[..., RetrievalCache]] = {
    "a2ats": A2ATSCache,
    "aqua": partial(AquaKVCache, bits=16),
}
CACHES: dict[str, Callable[..., RetrievalCache]] = {
    cls.name: cls for cls in (FlatKVCache, ParisKVCache, LRQKCache, CTkvrCache, H2OCache)
}
ALL_CACHES = CACHES | LEARNED
STORES = ("device", "host", "resident", "cpu")
# Of four query heads; the other methods have them select together, or select nothing.
HEADS_TOGETHER = (None, 1, 3)
IN_GROUPS = ("flat", "paris", "lrqk", "a2ats")
DEFAULT = ("deepseek_v3", "glm4_moe_lite")
# Models with recurrent layers can't go back, neither with transformers' own cache.
RECURRENT = ("kimi_linear", "bailing_hybrid")
RELEASE = ".".join(transformers.__version__.split(".")[:2])


ArtifactOptions = Callable[[str, str], dict[str, str]]


def cases(models: Iterable[str], methods: Iterable[str]) -> list[dict[str, Any]]:
    """Every pair of two factors once."""
    factors = {"model": models, "mode": MODES, "method": methods, "store": STORES}
    factors["select_heads"] = HEADS_TOGETHER
    return pairwise({name: list(values) for name, values in factors.items()}, _is_served)


def _is_served(case: dict[str, Any]) -> bool:
    method = case.get("method", "flat")
    if method == "aqua" and case.get("store", "device") not in ("device", "host"):
        return False
    return case.get("select_heads") is None or method in IN_GROUPS


def one_for_each_mode() -> list[dict[str, Any]]:
    """Cases of methods that learn: all their stores, both models, heads together and apart."""
    factors = {"store": STORES, "select_heads": HEADS_TOGETHER}
    kinds = pairwise({"model": list(DEFAULT), "method": list(LEARNED)} | factors, _is_served)
    return [{"mode": mode, **kind} for mode, kind in zip(MODES, cycle(kinds), strict=False)]


def check(
    artifact_options: ArtifactOptions,
    model: str,
    mode: str,
    method: str,
    store: str,
    select_heads: int | None,
) -> None:
    options = COVERING_OPTIONS | {"store": store, "select_heads": select_heads}
    options |= artifact_options(method, model)

    def make(built: Any) -> RetrievalCache:
        return ALL_CACHES[method](config=built.config, **options)

    expect(run_case(Case(model, mode), make), model, mode)


def expect(result: Result, model: str, mode: str) -> None:
    if result.status == "skipped":
        # What transformers' own cache can't do; few modes, or something vanished in silence.
        assert model in RECURRENT or mode in {"early_exit", "guidance"}, result.detail
        pytest.skip(result.detail)
    assert result.status == "passed", result.detail


def name_of(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values()))


@pytest.mark.parametrize("case", cases(DEFAULT, CACHES), ids=name_of)
def test_same_as_full_attention(case: dict[str, Any], artifact_options: ArtifactOptions) -> None:
    check(artifact_options, **case)


@pytest.mark.parametrize("case", one_for_each_mode(), ids=name_of)
def test_methods_that_learn_are_the_same(
    case: dict[str, Any], artifact_options: ArtifactOptions
) -> None:
    check(artifact_options, **case)


@pytest.mark.parametrize(("model", "mode"), zip(cycle(DEFAULT), MODES))
def test_absorbed_attention_to_all_is_the_same(model: str, mode: str) -> None:
    def make(built: Any) -> RetrievalCache:
        return LatentKVCache(config=built.config)

    expect(run_case(Case(model, mode), make, proof=no_proof), model, mode)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(DEFAULT, LEARNED), ids=name_of)
def test_methods_that_learn_in_every_mode(
    case: dict[str, Any], artifact_options: ArtifactOptions
) -> None:
    check(artifact_options, **case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", cases([name for name in LATENT_MODELS if name not in DEFAULT], ALL_CACHES), ids=name_of
)
def test_other_families_too(case: dict[str, Any], artifact_options: ArtifactOptions) -> None:
    check(artifact_options, **case)
