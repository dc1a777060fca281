"""JSON from a stranger: a name that stands twice is found in linear time."""

from __future__ import annotations

import time

import pytest

from hf_kvret.io.strict_json import read_json


@pytest.mark.parametrize("name", ["name 0", "name 49999", "last"])
def test_a_name_that_stands_twice_is_found_at_once(name: str) -> None:
    names = [*(f"name {number}" for number in range(50_000)), "last", name]
    text = "{" + ", ".join(f'"{one}": 0' for one in names) + "}"
    begin = time.process_time()
    with pytest.raises(ValueError, match=f"'{name}' is there twice"):
        read_json(text)
    assert time.process_time() - begin < 2


def test_a_long_name_is_cut() -> None:
    name = "x" * 10_000
    with pytest.raises(ValueError, match=r"'x{80}' is there twice"):
        read_json(f'{{"{name}": 1, "{name}": 2}}')
