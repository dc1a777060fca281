"""Multi-head latent attention: with a budget that covers everything, what full attention gives."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import transformers

from hf_kvret import (
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

CACHES: dict[str, type[RetrievalCache]] = {
    cls.name: cls for cls in (FlatKVCache, ParisKVCache, LRQKCache, CTkvrCache, H2OCache)
}
STORES = ("device", "host", "resident", "cpu")
# Of four query heads; the other two methods have them select together.
HEADS_TOGETHER = (None, 1, 3)
IN_GROUPS = ("flat", "paris", "lrqk")
DEFAULT = ("deepseek_v3", "glm4_moe_lite")
# Models with recurrent layers can't go back, neither with transformers' own cache.
RECURRENT = ("kimi_linear", "bailing_hybrid")
RELEASE = ".".join(transformers.__version__.split(".")[:2])


def cases(models: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every pair of two factors once."""
    factors = {"model": models, "mode": MODES, "method": CACHES, "store": STORES}
    factors["select_heads"] = HEADS_TOGETHER
    return pairwise({name: list(values) for name, values in factors.items()}, _is_served)


def _is_served(case: dict[str, Any]) -> bool:
    return case.get("select_heads") is None or case.get("method", "flat") in IN_GROUPS


def check(model: str, mode: str, method: str, store: str, select_heads: int | None) -> None:
    options = COVERING_OPTIONS | {"store": store, "select_heads": select_heads}

    def make(built: Any) -> RetrievalCache:
        return CACHES[method](config=built.config, **options)

    expect(run_case(Case(model, mode), make), model, mode)


def expect(result: Result, model: str, mode: str) -> None:
    if result.status == "skipped":
        # What transformers' own cache can't do; few modes, or something vanished in silence.
        assert model in RECURRENT or mode in {"early_exit", "guidance"}, result.detail
        pytest.skip(result.detail)
    assert result.status == "passed", result.detail


@pytest.mark.parametrize("case", cases(DEFAULT), ids=lambda case: "-".join(map(str, case.values())))
def test_same_as_full_attention(case: dict[str, Any]) -> None:
    check(**case)


@pytest.mark.parametrize(("model", "mode"), zip(cycle(DEFAULT), MODES))
def test_absorbed_attention_to_all_is_the_same(model: str, mode: str) -> None:
    def make(built: Any) -> RetrievalCache:
        return LatentKVCache(config=built.config)

    expect(run_case(Case(model, mode), make, proof=no_proof), model, mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    cases(tuple(name for name in LATENT_MODELS if name not in DEFAULT)),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_other_families_too(case: dict[str, Any]) -> None:
    check(**case)
