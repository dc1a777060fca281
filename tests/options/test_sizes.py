"""Sizes of memory as people write them, and the option that takes one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hf_kvret.methods.flat import FlatConfig
from hf_kvret.methods.paris import ParisConfig
from hf_kvret.options.config import byte_count


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("90GB", 90_000_000_000),
        ("75GiB", 75 * 2**30),
        ("0.5 gib", 2**29),
        (" 1.5 kB ", 1500),
        ("3MiB", 3 * 2**20),
        ("2mb", 2_000_000),
        ("1KiB", 1024),
        ("1e9", 10**9),
        ("123", 123),
        (123, 123),
        (2**60 + 1, 2**60 + 1),
        (1, 1),
    ],
)
def test_sizes_are_read(size: int | str, count: int) -> None:
    assert byte_count(size) == count


@pytest.mark.parametrize(
    "size", ["", "GB", "-1GB", "0", "0.0GB", "0.4", "80 TBx", "5GBGB", "nan", "inf", "1e999GB"]
)
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match="is not a memory size: write 80GB, 75GiB, or bytes"):
        byte_count(size)


@pytest.mark.parametrize("size", [0, -5])
def test_counts_below_one_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} is not a memory size"):
        byte_count(size)


@pytest.mark.parametrize("size", [True, None, 1.5, b"1GB"])
def test_other_types_are_refused(size: Any) -> None:
    with pytest.raises(TypeError, match="is not a memory size"):
        byte_count(size)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device_budget": 0}, ValueError, "device_budget=0: write '90GB', .* store='host' keeps"),
        ({"device_budget": -1}, ValueError, "device_budget=-1: write '90GB'"),
        ({"device_budget": "much"}, ValueError, "device_budget='much': write '90GB'"),
        ({"device_budget": "90TB"}, ValueError, "device_budget='90TB': write '90GB'"),
        ({"device_budget": 1e9}, TypeError, "device_budget must be an int .* got 1000000000.0"),
        ({"device_budget": True}, TypeError, "device_budget must be an int .* got True"),
        (
            {"device_budget": "1GB", "store": "host"},
            ValueError,
            "device_budget='1GB' with store='host': it is of store='split', .* leave device_budget",
        ),
        ({"device_budget": "1GB", "store": "device"}, ValueError, "of store='split'"),
        ({"device_budget": "1GB", "store": "higgs"}, ValueError, "of store='split'"),
    ],
)
def test_a_bad_device_budget_is_refused_with_its_name(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    for cls in (FlatConfig, ParisConfig):
        with pytest.raises(error, match=words):
            cls.from_options(**options)


def test_a_device_budget_asks_for_a_split_and_survives_json() -> None:
    assert not FlatConfig().splits_rows and not FlatConfig(store="host").splits_rows
    for options in ({"store": "split"}, {"device_budget": "9GB"}, {"device_budget": 10**9}):
        config = FlatConfig.from_options(**options)
        assert config.splits_rows and config.exact().splits_rows
        options = json.loads(json.dumps(dataclasses.asdict(config)))
        assert FlatConfig.from_options(**options) == config
