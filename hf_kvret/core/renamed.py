"""Options that have a new name: the old one goes on working, with a warning."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any


class RenamesOptions(type):
    """Metaclass of option classes: a call may name options as earlier versions did.

    ``RENAMED = {"old": "new"}`` in a class says what was renamed; subclasses inherit it.
    """

    def renames(cls) -> dict[str, str]:
        """New names by old ones, those of all base classes included."""
        own = [vars(base).get("RENAMED", {}) for base in reversed(cls.__mro__)]
        return {old: new for renamed in own for old, new in renamed.items()}

    def current_names(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` by their names of today; a FutureWarning for each old one.

        Raises:
            ValueError: an option is given by two names.
        """
        renames = cls.renames()
        for old in options.keys() & renames.keys():
            warnings.warn(
                f"{cls.__name__}: the option {old!r} is now called {renames[old]!r}; "
                "the old name will be removed",
                FutureWarning,
                stacklevel=_stacklevel_of_caller(),
            )
        return rename(options, renames)

    # Type checkers shall go by the classes' own ``__init__``.
    if not TYPE_CHECKING:

        def __call__(cls, *values, **options):
            """An instance, made with the names of today."""
            return super().__call__(*values, **cls.current_names(options))


def rename(options: Mapping[str, Any], renames: Mapping[str, str]) -> dict[str, Any]:
    """``options`` by new names, in their order; ValueError where one is given by two names."""
    renamed: dict[str, Any] = {}
    for name, value in options.items():
        new = renames.get(name, name)
        if new in renamed:
            other = next(one for one in options if renames.get(one, one) == new)
            raise ValueError(f"{other} and {name} are the same option: give {new} alone")
        renamed[new] = value
    return renamed


def _stacklevel_of_caller() -> int:
    """The ``stacklevel`` of the first frame outside hf_kvret, for a warning by who calls this."""
    level, frame = 1, inspect.currentframe()
    frame = frame.f_back if frame else None
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] == "hf_kvret":
        level, frame = level + 1, frame.f_back
    return level
