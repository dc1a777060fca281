"""Declared options: what every method's options refuse, and in which words."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

import hf_kvret
from hf_kvret.options.config import PromptRecipe
from hf_kvret.options.declare import (
    FLAG,
    Kind,
    OneOf,
    check_options,
    declared,
    integer,
    option,
    real,
    text,
    words_of,
)

CONFIGS = [*(cls.Config for cls in hf_kvret.registered_methods().values()), PromptRecipe]


@dataclass(frozen=True)
class Base:
    count: int | None = option(2, integer(1, "tokens"), OneOf(None))
    share: float = option(0.5, real(note="a share", above=0, most=1))
    name: str = option("a", text(note="a name"))
    way: str | int = option("in", OneOf("in", "out", 4))
    on: bool = option(True, FLAG)
    free: object = None

    def __post_init__(self) -> None:
        check_options(self, prefix="base: ")


@dataclass(frozen=True)
class Derived(Base):
    count: int | None = None
    share: float = option(2.0, real(least=2, below=math.inf))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"count": 0}, ValueError, "base: count=0 must be at least 1 (tokens)"),
        ({"count": True}, TypeError, "base: count must be an int of at least 1 (tokens) or None"),
        ({"share": 0}, ValueError, "share=0 must be above 0 and at most 1 (a share)"),
        ({"share": math.nan}, ValueError, "share=nan must be above 0"),
        ({"share": "1"}, TypeError, "share must be a number above 0 and at most 1 (a share)"),
        ({"name": ""}, ValueError, "name='' must not be empty"),
        ({"name": 3}, TypeError, "name must be a text (a name), got 3"),
        ({"way": "up"}, ValueError, "way='up': choose 'in', 'out' or 4"),
        ({"way": 4.0}, ValueError, "way=4.0: choose"),
        ({"on": 1}, TypeError, "on must be True or False, got 1"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_what_is_allowed(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        Base(**options)
    assert words in str(raised.value)


def test_values_at_the_edge_are_taken_and_options_without_a_declaration_are_free() -> None:
    Base(count=1, share=1, name="b", way=4, on=False, free=object())
    Base(count=None, share=1e-9)


def test_another_default_keeps_what_is_declared_and_another_declaration_replaces_it() -> None:
    assert declared(Derived)["count"] == declared(Base)["count"] and Derived().count is None
    assert words_of(declared(Derived)["share"]) == "a number of at least 2 and below inf"
    with pytest.raises(ValueError, match=r"share=0\.5 must be at least 2"):
        Derived(share=0.5)


def _wrong(kinds: tuple[Kind, ...]) -> list[Any]:
    """Values that the ``kinds`` don't take: of another type, and beside each bound."""
    values: list[Any] = [object(), [1]]
    for kind in kinds:
        if isinstance(kind, OneOf):
            continue
        number = float if kind.type is float else int
        if kind.least is not None:
            values.append(number(kind.least - 1))
        if kind.above is not None:
            values.append(number(kind.above))
        if kind.type is float:
            values += [math.nan, *(kind.most + 1.0 for _ in range(kind.most is not None))]
        if kind.below is not None:
            values.append(kind.below if kind.type is float else int(kind.below))
    return [value for value in values if not _is_taken(value, kinds)]


def _is_taken(value: Any, kinds: tuple[Kind, ...]) -> bool:
    kind = next((one for one in kinds if one.takes(value)), None)
    try:
        return kind is not None and kind.check("x", value) is None
    except ValueError:
        return False


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_method_refuses_what_its_options_do_not_take(config: Any) -> None:
    for name, kinds in declared(config).items():
        for value in _wrong(kinds):
            with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
                config(**{name: value})
