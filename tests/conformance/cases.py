"""Shared by the files of this folder: methods, modes that tell much, and verdicts on cases."""

from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import pytest

from hf_kvret import AquaKVCache, RetrievalCache, registered_methods
from hf_kvret.testing import COVERING_OPTIONS, Case, Result, run_case

ArtifactOptions = Callable[[str, str], dict[str, str]]

STORES = ("device", "host", "resident", "cpu")
TELLING_MODES = (
    *("greedy_ragged", "beams_ragged", "prompt_lookup"),
    *("chunked_prefill", "second_turn_ragged", "crop_deep"),
)
RESTS: dict[str, dict[str, Any]] = {"nothing": {"rest": None}, "mean": {"rest": "mean"}}


def caches(*methods: str) -> dict[str, Callable[..., RetrievalCache]]:
    """Classes of caches by method; aqua's rows are its own codes, here at 16 bits."""
    classes = {**registered_methods(), "aqua": partial(AquaKVCache, bits=16)}
    return {method: classes[method] for method in methods}


def options_for(store: str) -> dict[str, Any]:
    """Options that cover everything in this store, whose rows are plain."""
    more = {"higgs": {"bits": 16}, "higgs-host": {"bits": 16}}
    return {**COVERING_OPTIONS, "store": store, **more.get(store, {})}


def is_served(case: dict[str, Any]) -> bool:
    """AQUA-KV's rows are its own codes, and it leaves nothing out that a mean could stand for."""
    takes = case.get("store", "device") in ("device", "host")
    is_whole = case.get("rest", "nothing") == "nothing"
    return not case.get("method", "").startswith("aqua") or (takes and is_whole)


def named_cases(rows: Iterable[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Cases of ``(model, mode, method, store)``."""
    return [dict(zip(("model", "mode", "method", "store"), row, strict=True)) for row in rows]


def check_case(
    make: Callable[..., RetrievalCache],
    model: str,
    mode: str,
    store: str,
    options: dict[str, Any],
    may_skip: Container[str] | None = None,
    device: str = "cpu",
) -> None:
    """A cache that ``make`` makes, with a store and more ``options``, in one mode of a model."""
    options = {**options_for(store), **options}
    case = Case(model, mode)
    result = run_case(case, lambda built: make(built.config, **options), device=device)
    expect_passed(result, may_skip)


def can_go_back(case: dict[str, Any]) -> bool:
    """A recurrent state can't be cropped."""
    backwards = case.get("mode") in ("prompt_lookup", "crop_deep")
    return not (backwards and case.get("model") == "qwen3_next")


def name_of(case: dict[str, Any]) -> str:
    """An identifier for pytest."""
    return "-".join(map(str, case.values()))


def expect_passed(result: Result, may_skip: Container[str] | None = None) -> None:
    """A case passes, or is skipped where transformers' own cache can't do its mode either.

    Skipping goes by trial: without ``may_skip`` a mode that broke would vanish in silence.
    """
    if result.status == "skipped":
        assert may_skip is None or result.case.mode in may_skip, result.detail
        pytest.skip(result.detail)
    assert result.status == "passed", result.detail
