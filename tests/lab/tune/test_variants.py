"""What is tried, and which filled cache each variant is a fork of."""

from __future__ import annotations

from typing import Any

import pytest

from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.tune.variants import Variant, ladder, make_variants
from hf_kvret.registry import registered_methods

CONTEXT = 8192


def made(*methods: str, budgets: Any = (64, 512)) -> dict[str, Variant]:
    return make_variants(methods, budgets, CONTEXT)


def test_variants_of_a_method_share_a_filled_cache() -> None:
    variants = made("flat", "paris", "paris:store=host")
    assert len(variants) == 3 * 2 * 2
    assert len({id(one.base) for one in variants.values()}) == 3
    one = variants["paris:store=host:top_k=512:rest=mean"]
    assert one.changes == {"top_k": 512, "rest": "mean"}
    assert one.cache_config == {"top_k": 512, "store": "host", "rest": "mean"}


def test_what_is_pasted_is_what_was_measured() -> None:
    """The fork's options are those of a new cache of the configuration, but for dense_below."""
    for name, one in made("paris", "lrqk:rank=8", budgets=(64, 0.1, CONTEXT - 2048)).items():
        pasted = registered_methods()[one.method].Config.from_options(**one.cache_config)
        assert choose_cache(name).options == pasted
        assert one.base.options is not None
        fork = one.base.options.replace(**one.changes)
        assert fork.replace(dense_below=0) == pasted.replace(dense_below=0)
        assert max(fork.dense_len, pasted.dense_len) < CONTEXT


def test_budgets_double_up_to_half_of_the_context() -> None:
    assert ladder(CONTEXT) == (64, 128, 256, 512, 1024, 2048, 4096, 6144)
    assert ladder(512) == (16, 32, 64, 128, 256, 384)


def test_budgets_near_the_context_retrieve_all_the_same() -> None:
    [one] = made("flat:rest=none", budgets=[6144]).values()
    assert one.name == "flat:rest=none:top_k=6144:dense_below=4096"
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
    assert all("top_k" not in one.changes for one in variants.values())


def test_a_method_that_attends_to_all_has_one_variant() -> None:
    [one] = made("aqua:artifact=somewhere").values()
    assert (one.name, one.cache_config) == ("aqua:artifact=somewhere", {"artifact": "somewhere"})


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["paris:dense_below=9000"], "attends to everything up to 9001 tokens"),
        (["paris:flush=9000"], r"\(sink, recent and flush\)"),
        (["paris:rank=3"], "has no option 'rank'"),
        (["paris:rest=half"], "rest='half'"),
        (["paris", "paris"], "paris:top_k=64 is there twice: see --methods and --top-k"),
    ],
)
def test_impossible_variants_are_refused(methods: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(*methods)
