"""Options declared once: a field of a dataclass is an option of a command.

    @dataclass(frozen=True)
    class Place:
        device: str = option("cpu", "cpu, cuda, or one of several as cuda:1", kind=device_name)

``add_options`` shows argparse the fields, ``read_options`` makes the dataclass of what it parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KEY = "hf_kvret option"

_Options = TypeVar("_Options", bound="DataclassInstance")


class _Declaration(NamedTuple):
    """The name of an option, where it is not the field's, and argparse's keywords."""

    name: str | None
    keywords: dict[str, Any]


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    kind: Callable[[str], Any] | None = None,
    choices: Iterable[Any] | None = None,
    metavar: str | None = None,
    name: str | None = None,
) -> Any:
    """A field that is an option of the command line; ``top_k`` is ``--top-k``.

    Args:
        default: immutable; without one the option is required. False makes a switch.
        help: a few words; the default is added to them.
        kind: makes the value of the text; raises ``argparse.ArgumentTypeError``. None for text, or
            for a whole number where the default is one.
        choices: the only values.
        metavar: what stands for the value in the help.
        name: on the command line where it is not the field's; one without dashes is positional.
    """
    keywords: dict[str, Any] = {"help": help}
    if default is False:
        keywords["action"] = "store_true"
    else:
        number = int if isinstance(default, int) else None
        keywords |= {"metavar": metavar, "type": kind or number}
        keywords["choices"] = None if choices is None else tuple(choices)
    return field(default=default, metadata={_KEY: _Declaration(name, keywords)})


def with_default(cls: type[Any], name: str, default: Any) -> Any:
    """The option ``name`` of ``cls`` with another default, for a subclass."""
    inherited = next(one for one in _options(cls) if one.name == name)
    return field(default=default, metadata=inherited.metadata)


def add_options(parser: argparse.ArgumentParser, cls: type[DataclassInstance]) -> None:
    """Add the options of a dataclass to a parser; fields without ``option`` are none."""
    for one in _options(cls):
        name, words = one.metadata[_KEY]
        name = name or f"--{one.name.replace('_', '-')}"
        keywords = dict(words)
        if name.startswith("-"):
            keywords |= {"dest": one.name, "required": one.default is MISSING}
        if one.default is not MISSING:
            keywords["default"] = one.default
        parser.add_argument(name, **keywords)


def read_options(cls: type[_Options], parsed: argparse.Namespace) -> _Options:
    """The dataclass with the values that were parsed; errors are those of its own checks."""
    return cls(**{one.name: getattr(parsed, one.name) for one in _options(cls)})


def _options(cls: type[DataclassInstance]) -> list[Field[Any]]:
    return [one for one in fields(cls) if _KEY in one.metadata]
