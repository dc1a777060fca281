"""What is tried, and which filled cache each variant is a fork of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_kvret.lab.evaluate.bundled import BUNDLED_MODEL
from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.tune.variants import (
    Variant,
    find_artifacts,
    make_variants,
)
from hf_kvret.registry import registered_methods

CONTEXT = 8192


def made(*methods: str, **changes: Any) -> dict[str, Variant]:
    options = {"stores": ["auto"], "budgets": [64, 512], "rests": ["off"], "artifacts": {}}
    return make_variants(methods, context=CONTEXT, **(options | changes))


def test_variants_of_a_method_and_store_share_a_filled_cache() -> None:
    variants = made("flat", "paris", stores=["device", "host"], rests=["off", "mean"])
    assert len(variants) == 2 * 2 * 2 * 2
    bases = {one.base.name: one.base for one in variants.values()}
    assert list(bases) == [
        "flat:store=device",
        "flat:store=host",
        "paris:store=device",
        "paris:store=host",
    ]
    # Those of a base stand together, so that it is filled once.
    order = [one.base.name for one in variants.values()]
    assert order == sorted(order, key=list(bases).index)
    one = variants["paris:store=host:top_k=512:rest=mean"]
    assert one.changes == {"top_k": 512, "rest": "mean"}
    assert one.cache_config == {"top_k": 512, "store": "host", "rest": "mean"}


def test_what_is_pasted_is_what_was_measured() -> None:
    """The fork's options are those of a new cache of the configuration, but for dense_below."""
    variants = made(
        "paris", "lrqk:rank=8", "ctkvr", rests=["off", "mean"], budgets=[64, 0.1, CONTEXT - 2048]
    )
    for name, one in variants.items():
        config_class = registered_methods()[one.method].Config
        pasted = config_class.from_options(**one.cache_config)
        assert choose_cache(name).options == pasted
        assert one.base.options is not None
        fork = one.base.options.replace(**one.changes)
        assert fork.replace(dense_below=0) == pasted.replace(dense_below=0)
        assert max(fork.dense_len, pasted.dense_len) < CONTEXT


def test_budgets_near_the_context_retrieve_all_the_same() -> None:
    [one] = made("flat", budgets=[6144]).values()
    assert one.name == "flat:top_k=6144:dense_below=4096"
    assert one.cache_config == {"top_k": 6144, "dense_below": 4096}


def test_options_of_a_method_stay_and_free_ones_share_its_cache() -> None:
    variants = made("paris:recent=64", "paris:max_draft=8", "paris:top_k=7", "paris")
    assert "paris:recent=64:top_k=64" in variants and "paris:top_k=7" in variants
    assert variants["paris:max_draft=8:top_k=64"].base is variants["paris:top_k=7"].base
    assert variants["paris:recent=64:top_k=64"].base is not variants["paris:top_k=7"].base


def test_what_a_fill_keeps_is_no_change_of_a_fork() -> None:
    """H2O evicts by its budget while it reads."""
    variants = made("h2o")
    assert len({id(one.base) for one in variants.values()}) == 2
    assert all(not one.changes for one in variants.values())


def test_a_method_that_attends_to_all_has_one_variant() -> None:
    options = {"artifacts": {"aqua": "somewhere"}, "rests": ["off", "mean"]}
    variants = made("aqua", stores=["auto", "resident"], **options)
    assert [(one.name, one.cache_config) for one in variants.values()] == [
        ("aqua", {"artifact": "somewhere"})
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["paris:dense_below=9000"]}, "attends to everything up to 9001 tokens"),
        ({"methods": ["paris:flush=9000"]}, r"\(sink, recent and flush\)"),
        ({"methods": ["paris:rank=3"]}, "has no option 'rank'"),
        ({"methods": ["paris"], "rests": ["half"]}, "rest='half'"),
    ],
)
def test_impossible_variants_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(*options.pop("methods"), **options)


def test_artifacts_are_known_by_their_method(tmp_path: Path) -> None:
    folder = str(BUNDLED_MODEL / "a2ats")
    assert find_artifacts([folder]) == {"a2ats": folder}
    with pytest.raises(ValueError, match="are both of a2ats: give one"):
        find_artifacts([folder, folder])
    with pytest.raises(FileNotFoundError):
        find_artifacts([str(tmp_path / "nothing")])
