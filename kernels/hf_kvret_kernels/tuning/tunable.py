"""Tunable: the launch parameters of an operation, by size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Generic, TypeVar

import torch

C = TypeVar("C")


@dataclass(frozen=True)
class Tunable(Generic[C]):
    """The launch numbers of an operation.

    Attributes:
        name: of the operation.
        version: incremented when a kernel change makes old measurements invalid.
        size: NamedTuple of strings, integers and booleans; equal ones share a choice. Lengths in it
            are rounded by ``power_of_two``.
        kind: frozen dataclass of launch numbers, integers and strings.
        space: the values that each field of ``kind`` may take, the outer ones of a search first.
        only: ``field: (other, value)`` for fields that count only where ``other`` is ``value``.

    Raises:
        ValueError: ``space`` does not name exactly the fields of ``kind``.
    """

    name: str
    version: int
    size: type[Any]
    kind: type[C]
    space: Mapping[str, tuple[int | str, ...]]
    only: Mapping[str, tuple[str, int | str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {one.name for one in fields(self.kind)}  # type: ignore[arg-type]
        if set(self.space) != names:
            raise ValueError(
                f"space of {self.name} names {sorted(self.space)}: it must name the fields of "
                f"{self.kind.__name__}, {sorted(names)}"
            )

    def counts(self, name: str, choice: C) -> bool:
        """Whether the field ``name`` has an effect, given the other fields of ``choice``."""
        other, value = self.only.get(name, (name, getattr(choice, name)))
        return bool(getattr(choice, other) == value)

    def check(self, choice: C) -> None:
        """ValueError for a choice that is outside of ``space``."""
        for name, values in self.space.items():
            value = getattr(choice, name)
            # True equals 1, but is not a launch number.
            if type(value) not in {type(one) for one in values} or value not in values:
                raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, values))}")

    def choice_from(self, item: object) -> C:
        """The choice from a file's JSON object; ValueError if it is invalid."""
        self._check_names(item, set(self.space), "choice")
        choice = self.kind(**item)  # type: ignore[arg-type]
        self.check(choice)
        return choice

    def size_from(self, item: object) -> Any:
        """The size class from a file's JSON object; ValueError if it is invalid."""
        self._check_names(item, set(self.size._fields), "size")
        assert isinstance(item, dict)
        if not all(isinstance(value, str | int) for value in item.values()):
            raise ValueError(f"size {item}: its values must be strings, integers or booleans")
        return self.size(**item)

    def as_json(self, choice: C) -> dict[str, Any]:
        """The JSON object that ``choice_from`` reads."""
        return asdict(choice)  # type: ignore[call-overload]

    def _check_names(self, item: object, names: set[str], what: str) -> None:
        if not isinstance(item, dict) or set(item) != names:
            raise ValueError(f"{what} {item!r}: pass an object with {', '.join(sorted(names))}")


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """As ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def power_of_two(count: int) -> int:
    """The least power of two that is not below ``count``; 0 for 0.

    Raises:
        ValueError: a negative count.
    """
    if count < 0:
        raise ValueError(f"count={count}: at least 0")
    return 1 << (count - 1).bit_length() if count else 0
