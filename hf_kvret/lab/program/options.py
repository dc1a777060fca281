"""Options declared once: a field of a dataclass is an option of a command.

    @dataclass(frozen=True)
    class Place:
        device: str = option("cpu", "cpu, cuda, or one of several as cuda:1", kind=device_name)

``add_options`` shows argparse the fields, ``read_options`` makes the dataclass of what it parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_KEY = "hf_kvret option"

_Options = TypeVar("_Options", bound="DataclassInstance")


@dataclass(frozen=True)
class _Declared:
    """What argparse is told of a field."""

    help: str
    kind: Callable[[str], Any] | None
    choices: Iterable[Any] | None
    metavar: str | None
    aliases: tuple[str, ...]
    name: str | None


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    kind: Callable[[str], Any] | None = None,
    choices: Iterable[Any] | None = None,
    metavar: str | None = None,
    aliases: Sequence[str] = (),
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
        aliases: more names, as ``--new-tokens``.
        name: on the command line where it is not the field's; one without dashes is positional.
    """
    declared = _Declared(help, kind, choices, metavar, tuple(aliases), name)
    return field(default=default, metadata={_KEY: declared})


def with_default(kind: type[Any], name: str, default: Any) -> Any:
    """The option ``name`` of ``kind`` with another default, for a subclass."""
    inherited = next(one for one in _options(kind) if one.name == name)
    return field(default=default, metadata=inherited.metadata)


def add_options(parser: argparse.ArgumentParser, kind: type[DataclassInstance]) -> None:
    """Add the options of a dataclass to a parser; fields without ``option`` are none."""
    for one in _options(kind):
        declared: _Declared = one.metadata[_KEY]
        names = [declared.name or f"--{one.name.replace('_', '-')}", *declared.aliases]
        text = declared.help
        positional = not names[0].startswith("-")
        given: dict[str, Any] = {"help": text} | ({} if positional else {"dest": one.name})
        if one.default is False:
            parser.add_argument(*names, action="store_true", **given)
            continue
        given["metavar"] = declared.metavar
        if declared.kind is not None:
            given["type"] = declared.kind
        elif isinstance(one.default, int):
            given["type"] = int
        if declared.choices is not None:
            given["choices"] = tuple(declared.choices)
        if one.default is not MISSING:
            given["default"] = one.default
        elif not positional:
            given["required"] = True
        parser.add_argument(*names, **given)


def read_options(kind: type[_Options], parsed: argparse.Namespace) -> _Options:
    """The dataclass with the values that were parsed; errors are those of its own checks."""
    return kind(**{one.name: getattr(parsed, one.name) for one in _options(kind)})


def _options(kind: type[DataclassInstance]) -> list[Field[Any]]:
    return [one for one in fields(kind) if _KEY in one.metadata]
