"""Options by an old name: they work with a warning, never beside the new name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hf_kvret import CTkvrCache, CTkvrConfig, RetrievalConfig
from hf_kvret.core.renamed import rename
from hf_kvret.testing import MODELS


@dataclass(frozen=True)
class Older(RetrievalConfig):
    """One option was renamed in the class, another in the class below."""

    RENAMED = MappingProxyType({"width": "list_len"})

    list_len: int = 3


@dataclass(frozen=True)
class Newer(Older):
    """Inherits the renamed option."""

    RENAMED = MappingProxyType({"heat": "warmth"})

    warmth: int = 5


MAKE: dict[str, Callable[..., RetrievalConfig]] = {
    "class": Newer,
    "from_options": Newer.from_options,
    "replace": Newer().replace,
}


@pytest.mark.parametrize("way", MAKE)
def test_an_old_name_works_with_a_warning_that_names_the_new_one(way: str) -> None:
    with pytest.warns(FutureWarning, match="Newer: the option 'width' is now called 'list_len'"):
        assert MAKE[way](width=7, warmth=1) == Newer(list_len=7, warmth=1)
    with pytest.warns(FutureWarning, match="'heat' is now called 'warmth'"):
        assert MAKE[way](heat=7) == Newer(warmth=7)


@pytest.mark.parametrize("way", MAKE)
def test_both_names_are_refused(way: str) -> None:
    both = {"width": 7, "list_len": 7}
    for options in (both, dict(reversed(both.items()))):
        with (
            pytest.warns(FutureWarning),
            pytest.raises(ValueError, match="are the same option: give list_len alone"),
        ):
            MAKE[way](**options)


def test_each_use_warns_once_and_says_where() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Newer(width=7)
        Newer.from_options(width=7)
        Newer().replace(width=7)
    assert [Path(one.filename).name for one in caught] == ["test_renamed.py"] * 3


def test_new_names_and_saved_options_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Newer(list_len=7).replace(warmth=2) == Newer(list_len=7, warmth=2)
        assert Newer.from_saved({"width": 7, "heat": 2}) == Newer(list_len=7, warmth=2)
        assert Newer.from_saved({"list_len": 7}) == Newer(list_len=7)
        with pytest.raises(ValueError, match="width and list_len are the same option"):
            Newer.from_saved({"width": 7, "list_len": 7})


def test_old_names_are_no_options_of_other_classes() -> None:
    with pytest.raises(ValueError, match="has no option 'heat'"):
        Older.from_options(heat=1)
    with pytest.raises(TypeError, match="heat"):
        Older(heat=1)


def test_names_keep_their_order() -> None:
    renamed = rename({"c": 1, "a": 2, "b": 3}, {"a": "z"})
    assert list(renamed.items()) == [("c", 1), ("z", 2), ("b", 3)]


def _cached(**options: Any) -> int:
    cache = CTkvrCache(MODELS["llama"].build().config, **options)
    assert isinstance(cache.options, CTkvrConfig)
    return cache.options.nprobe


def test_ctkvr_takes_its_former_option() -> None:
    with pytest.warns(FutureWarning, match="'probes' is now called 'nprobe'"):
        assert _cached(probes=7) == 7
    with pytest.warns(FutureWarning, match="'probes' is now called 'nprobe'"):
        assert _cached(options=CTkvrConfig(nprobe=2), probes=7) == 7
    with pytest.warns(FutureWarning, match="'probes' is now called 'nprobe'"):
        assert CTkvrConfig.paper(probes=7).nprobe == 7
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="give nprobe alone"):
        _cached(probes=7, nprobe=7)
