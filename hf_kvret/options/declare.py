"""Options say in their field which values they take: checks, errors and pages follow from it.

``top_k: int | None = option(1024, integer(1, "tokens"), OneOf(None))`` takes an int of at least 1,
or None.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

_NOUNS = {int: "an int", float: "a number", str: "a text", bool: "True or False"}


@dataclass(frozen=True)
class Values:
    """Values of one type that an option takes.

    Attributes:
        type: ``int``, ``float`` (ints are taken, too), ``str`` (not empty) or ``bool``.
        least: of a number; None: no bound.
        note: what a value counts or means.
        above, most, below: other bounds of a number.
    """

    type: type
    least: float | None = None
    note: str = ""
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def takes(self, value: object) -> bool:
        """Whether a value has this type; a bool is no number."""
        types = (int, float) if self.type is float else self.type
        return isinstance(value, types) and isinstance(value, bool) == (self.type is bool)

    def check(self, name: str, value: Any) -> None:
        """ValueError for a ``value`` of this type that is out of range, or an empty text."""
        if value == "":
            raise ValueError(f"{name}='' must not be empty")
        inside = (
            self.least is None or value >= self.least,
            self.above is None or value > self.above,
            self.most is None or value <= self.most,
            self.below is None or value < self.below,
        )
        if not all(inside):
            raise ValueError(f"{name}={value} must be {self._range}{self._noted}")

    @property
    def words(self) -> list[str]:
        """What a value is, with its range."""
        joint = " of " if self._range.startswith("at") else " "
        return [f"{_NOUNS[self.type]}{joint}{self._range}".rstrip() + self._noted]

    @property
    def _range(self) -> str:
        bounds = {"at least": self.least, "above": self.above}
        bounds |= {"at most": self.most, "below": self.below}
        return " and ".join(f"{word} {x:g}" for word, x in bounds.items() if x is not None)

    @property
    def _noted(self) -> str:
        return f" ({self.note})" if self.note else ""


integer, real, text = (functools.partial(Values, kind) for kind in (int, float, str))
FLAG = Values(bool)


class OneOf:
    """The only values that an option takes."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def takes(self, value: object) -> bool:
        """Whether a value is one of them."""
        # 4.0 equals the choice 4, but is of another type.
        return any(isinstance(value, type(one)) and value == one for one in self.values)

    def check(self, name: str, value: object) -> None:
        """Nothing, since a value that is taken is one of them."""

    @property
    def words(self) -> list[str]:
        """The values."""
        return [repr(value) for value in self.values]


Kind = Values | OneOf


def option(default: Any, *kinds: Kind) -> Any:
    """A dataclass's field for an option that takes values of any of the ``kinds``."""
    return dataclasses.field(default=default, metadata={"kinds": kinds})


@functools.cache
def declared(cls: Any) -> dict[str, tuple[Kind, ...]]:
    """The kinds of each declared option of a dataclass.

    A subclass that gives an option another default alone keeps its kinds.
    """
    result: dict[str, tuple[Kind, ...]] = {}
    for base in reversed(cls.__mro__):
        for field in vars(base).get("__dataclass_fields__", {}).values():
            if "kinds" in field.metadata:
                result[field.name] = field.metadata["kinds"]
    return result


def words_of(kinds: tuple[Kind, ...]) -> str:
    """What an option takes, as a part of a sentence."""
    *first, last = (word for kind in kinds for word in kind.words)
    return f"{', '.join(first)} or {last}" if first else last


def check_value(name: str, value: object, *kinds: Kind) -> None:
    """TypeError or ValueError, which say what is allowed, for a value of none of the ``kinds``."""
    for kind in kinds:
        if kind.takes(value):
            kind.check(name, value)
            return
    if all(isinstance(kind, OneOf) for kind in kinds):
        raise ValueError(f"{name}={value!r}: choose {words_of(kinds)}")
    raise TypeError(f"{name} must be {words_of(kinds)}, got {value!r}")


def check_options(options: Any, prefix: str = "") -> None:
    """``check_value`` for all declared options of a dataclass; ``prefix`` stands before names."""
    for name, kinds in declared(options.__class__).items():
        check_value(prefix + name, getattr(options, name), *kinds)
