"""Options: what is refused, what the numbers mean, sizes of memory, and that they survive JSON."""

from typing import Any

import pytest

from hf_kvret import RetrievalConfig
from hf_kvret.methods.flat import FlatConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.options.config import byte_count


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 0}, r"top_k=0 must be at least 1 \(a count\)"),
        ({"top_k": 64, "slots": 63}, "slots=63 is less than top_k=64"),
        ({"top_k": 0.5, "slots": 64}, r"slots=2\.0"),
        ({"prefill_chunk": 32}, "prefill_chunk=32 with max_draft=32: .* as 1024, or 'auto'"),
        ({"store": "disk"}, "disk=None with store='disk'"),
        ({"store": "disk", "disk": ""}, "disk='' must not be empty"),
        ({"disk": "/tmp"}, "disk='/tmp' with store='auto'"),
        ({"topk": 3}, r"no option 'topk': did you mean 'top_k'\?"),
        ({"zzzzzz": 3}, r"no option 'zzzzzz': The options are top_k, sink"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_with_its_name(options: dict[str, Any], words: str) -> None:
    for cls in (FlatConfig, ParisConfig):
        with pytest.raises((ValueError, TypeError), match=words):
            cls.from_options(**options)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        *(("90GB", 90_000_000_000), ("75GiB", 75 * 2**30), ("0.5 gib", 2**29)),
        *((" 1.5 kB ", 1500), ("1e9", 10**9), ("123", 123), (2**60 + 1, 2**60 + 1)),
    ],
)
def test_sizes_are_read(size: int | str, count: int) -> None:
    assert byte_count(size) == count


@pytest.mark.parametrize(
    ("size", "error"),
    [*((size, ValueError) for size in ("", "0.4", "80 TBx", "inf", 0)), (1.5, TypeError)],
)
def test_what_is_no_size_is_refused(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="is not a memory size: write '80GB', '75GiB', or bytes"):
        byte_count(size)


@pytest.mark.parametrize(
    ("top_k", "cold", "budget"),
    [
        *((8, 100, 8), (8, 5, 5), (0.5, 100, 50), (0.25, 3, 1)),
        *((0.1, 15, 2), (1e-9, 50, 1), (1.0, 7, 7)),
    ],
)
def test_the_budget_is_a_count_or_a_share(top_k: float, cold: int, budget: int) -> None:
    assert RetrievalConfig(top_k=top_k).budget(cold) == budget


def test_short_caches_stay_dense_by_default() -> None:
    assert RetrievalConfig(top_k=8).dense_len == 2000
    assert RetrievalConfig(top_k=5000, sink=4, recent=256).dense_len == 10260
    assert RetrievalConfig(top_k=0.5).dense_len == 2000
    assert RetrievalConfig(dense_below=0).dense_len == 0


def test_paris_ratios_follow_the_schedule_to_its_end() -> None:
    """From 30,000 tokens on there are fewer candidates than in the paper."""
    ours, paper = ParisConfig(), ParisConfig.preset("paper")
    assert all(ours.ratios(length)[0] == paper.ratios(length)[0] for length in (4_999, 9_999))
    shares = [ours.ratios(length)[0] for length in (29_999, 30_000, 524_287, 524_288)]
    assert shares == [0.25, 0.08, 0.08, 0.07]
    assert [paper.ratios(length) for length in (4_999, 5_000)] == [(0.50, 0.50), (0.25, 0.30)]
    assert [paper.ratios(length) for length in (29_999, 10**9)] == [(0.20, 0.25), (0.10, 0.20)]


def test_the_published_options_are_their_own() -> None:
    paper = ParisConfig.preset("paper")
    assert (paper.top_k, paper.group_reduce, paper.center) == (100, "mean", False)
    assert paper.tables == "paper"
