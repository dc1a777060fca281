"""Options of a command as fields of a dataclass, and those that several commands have.

``add_options`` gives a parser the fields, ``read_options`` makes the dataclass of what it parsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hf_kvret.lab.program import arguments
from hf_kvret_kernels.host_library import PROCESSORS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# A field has here its option's name, where that is another, and argparse's keywords.
_KEY = "hf_kvret option"

_Options = TypeVar("_Options", bound="DataclassInstance")


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
    return field(default=default, metadata={_KEY: (name, keywords)})


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


def budget_option(usual: int | float = 256) -> Any:
    """``--top-k`` of retrieval caches that name none."""
    return option(usual, "of retrieval caches: a count, or a share as 0.04", kind=arguments.budget)


def dtype_option(usual: str = "float32") -> Any:
    """``--dtype``, a name of ``arguments.DTYPES``."""
    return option(usual, "of the model", choices=arguments.DTYPES)


def device_option() -> Any:
    """``--device``; ``arguments.check_device`` says whether it is there."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    return option(usual, "cpu, cuda, or one of several as cuda:1", kind=arguments.device_name)


def device_map_option() -> Any:
    """``--device-map``, over which devices a model is spread."""
    return option(
        None,
        "auto: spread a model that is too large for one device over all of them, over the host's "
        "memory and the disk (takes accelerate)",
        choices=("auto",),
    )


def seed_option(usual: int = 42) -> Any:
    """``--seed``, what random numbers begin with."""
    return option(usual, "of all random numbers", kind=arguments.seed)


def context_option(usual: tuple[int, ...], of: str) -> Any:
    """``--context``, numbers of tokens."""
    return option(usual, of, kind=arguments.lengths)


def text_option(of: str = "contexts are cut from it", *, required: bool = True) -> Any:
    """``--text``, a file."""
    usual = MISSING if required else None
    return option(usual, of, kind=arguments.file_path, metavar="FILE")


def count_option(usual: int, of: str) -> Any:
    """A whole number from 1."""
    return option(usual, of, kind=arguments.whole_number(1))


def threads_option(usual: int | None, of: str) -> Any:
    """``--threads``, at most the processors of this process."""
    return option(usual, of, kind=arguments.whole_number(1, PROCESSORS))


def limit_option(usual: float, of: str) -> Any:
    """``--limit`` in seconds."""
    return option(usual, of, kind=arguments.number(0), metavar="SECONDS")


def questions_option() -> Any:
    """``--questions``, a tuple of "inside" and "after"."""
    return option(
        ("inside",),
        "read with the text, or fed after it",
        kind=arguments.one_or_both("inside", "after"),
        metavar="{inside,after,both}",
    )


def answer_tokens_option() -> Any:
    """``--answer-tokens``."""
    return count_option(32, "most tokens of an answer in text")
