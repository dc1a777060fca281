"""What is tried on which windows, which variants run on, the front and the choice."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from hf_kvret.lab.evaluate.caches import choose_cache
from hf_kvret.lab.evaluate.measurement import Row
from hf_kvret.lab.report.results import Results
from hf_kvret.lab.tune.selection import (
    Measured,
    choose,
    finalists,
    front,
    standing,
    still_running,
    tuning_text,
)
from hf_kvret.lab.tune.variants import Variant, cut_windows, ladder, make_variants, needle_windows
from hf_kvret.registry import registered_methods

CONTEXT = 8192


def made(*methods: str, budgets: Any = (64, 512)) -> dict[str, Variant]:
    return make_variants(methods, budgets, CONTEXT)


def test_variants_of_a_method_share_a_filled_cache() -> None:
    variants = made("flat", "paris", "paris:store=host")
    assert len(variants) == 3 * 2 * 2
    assert len({id(one.base) for one in variants.values()}) == 3
    one = variants["paris:store=host:top_k=512:rest=none"]
    assert one.changes == {"top_k": 512, "rest": None}
    assert one.cache_config == {"top_k": 512, "store": "host", "rest": None}


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
    [one] = made("flat:rest=mean", budgets=[6144]).values()
    assert one.name == "flat:rest=mean:top_k=6144:dense_below=4096"
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


def row(equal: int, step_bytes: int, ms: float = 1.0, tokens: int = 100) -> Row:
    sizes = {"step_bytes": step_bytes, "device_bytes": 0}
    return {"tokens": tokens, "equal": equal, **sizes, "ms": ms, "kl": 0.1 * tokens}


def variant(name: str, *equal: int, bytes: int, ms: float = 1.0) -> Measured:
    return Measured(name, tuple(row(one, bytes, ms) for one in equal))


def test_numbers_are_means_over_tokens_and_windows() -> None:
    one = Measured("a", (row(90, 10), row(30, 40, ms=3.0, tokens=50)))
    assert one.tokens == 150 and one.agreement == 0.8 and one.cost == (25, 2.0)
    share = 120.5 / 151
    assert one.agreement_error == pytest.approx(1.5 * math.sqrt(share * (1 - share) / 150))
    assert one.kl == pytest.approx(0.1)


def test_the_cheapest_with_an_error_to_spare_is_chosen() -> None:
    measured = [
        variant("sure", 99, bytes=30),
        variant("surer", 100, bytes=40),
        variant("mean", 96, bytes=20),
        variant("short", 80, bytes=10),
    ]
    for first, name, certainty in (
        (0, "sure", "sure"),
        (2, "mean", "mean"),
        (3, "short", "missed"),
    ):
        choice, sure = choose(measured[first:], 0.95)
        assert (choice and choice.name, sure) == (name, certainty)
    assert choose([], 0.95) == (None, "missed")
    slow, quick = variant("slow", 99, bytes=5, ms=2.0), variant("quick", 99, bytes=5)
    assert choose([slow, quick], 0.9)[0] is quick


def test_the_front_has_those_that_agree_more_than_all_cheaper_ones() -> None:
    measured = [
        variant("best", 99, bytes=40),
        variant("cheap", 80, bytes=10),
        variant("beaten", 80, bytes=11),
        variant("slower", 99, bytes=40, ms=3.0),
    ]
    assert [one.name for one in front(measured)] == ["cheap", "best"]


def test_variants_run_while_they_may_be_chosen() -> None:
    shares = (50, 60, 88, 90, 93, 97, 99, 99)
    ladder = [variant(f"{place}", *[equal] * 4, bytes=place) for place, equal in enumerate(shares)]
    # Four hundred tokens around 90 have an error of 2.25: 97 is sure, and 60 is far below.
    assert still_running(ladder, 0.9) == ["2", "3", "4", "5"]
    # Nothing is sure yet for the same shares of fewer tokens.
    short = [Measured(one.name, one.rows[:1]) for one in ladder]
    assert still_running(short, 0.9) == ["2", "3", "4", "5", "6", "7"]
    low = [variant(str(equal), equal, bytes=equal) for equal in range(10, 26)]
    assert still_running(low, 0.99) == ["25"] and still_running([], 0.9) == []


def _results(rows: dict[tuple[str, int], Row], variants: int) -> Results:
    results = Results("tune", {"windows": 2, "agreement": 0.95, "variants": variants})
    for window in range(2):
        results.add({"cache": "full", "window": window}, row(100, 99))
    for (name, window), one in rows.items():
        results.add({"cache": name, "window": window}, one)
    return results


def test_finalists_are_known_when_the_last_window_is_over() -> None:
    shares = {"low": 60, "near": 94, "other": 95, "high": 96}
    rows = {(name, 0): row(share, number) for number, (name, share) in enumerate(shares.items())}
    assert finalists(_results(rows, 5)) == []
    assert standing(_results(rows, 4), list(shares)) == (1, ["near", "other", "high"])
    assert ". 1 were measured on fewer tokens" in tuning_text(_results(rows, 4))
    for name in ("near", "other", "high"):
        assert finalists(_results(rows, 4)) == []
        rows[name, 1] = row(95, 1)
    assert [one.name for one in finalists(_results(rows, 4))] == ["near", "other", "high"]
    # A variant that did not fit into memory is out, at whichever time.
    rows["near", 1] = {"out_of_memory": "no room"}
    assert [one.name for one in finalists(_results(rows, 4))] == ["other", "high"]


def test_the_choice_stands_in_the_table() -> None:
    rows = {("long", 0): row(94, 10), ("long", 1): row(100, 10), ("short", 0): row(98, 9)}
    assert "Not finished" in tuning_text(_results(rows, 2))
    rows["short", 1] = {"out_of_memory": "no room"}
    rows = {cell: one | {"method": "flat", "cache_config": {}} for cell, one in rows.items()}
    text = tuning_text(_results(rows, 2))
    assert "| **long**" in text and "| short " in text and "Out of memory: short" in text


@pytest.mark.parametrize(("length", "bos"), [(140, None), (141, 999), (1000, 999)])
def test_continuations_never_overlap_and_are_of_the_text(length: int, bos: int | None) -> None:
    context, new, count = 100, 10, 4
    for seed in range(5):
        starts = []
        for window in cut_windows(torch.arange(length), context, new, count, bos=bos, seed=seed):
            assert window.shape == (context + new,) and window.dtype == torch.int64
            text = window if bos is None else window[1:]
            assert bos is None or window[0] == bos
            first = int(text[0])
            assert 0 <= first <= length - len(text)
            assert torch.equal(text, torch.arange(first, first + len(text)))
            starts.append(int(window[-new]))
        assert len(starts) == count
        assert all(new <= right - left for left, right in pairwise(sorted(starts)))


def test_a_short_text_is_refused_and_needles_make_their_own() -> None:
    with pytest.raises(ValueError, match="139 tokens, fewer than the 100 of --context and the 40"):
        cut_windows(torch.arange(139), 100, 10, 4, bos=None, seed=0)
    first, second = needle_windows(200, 50, 2, seed=0)
    assert len(first) == 250 and not torch.equal(first, second)
