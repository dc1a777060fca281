"""Types of arguments on the command line, for argparse, whose errors then name the option."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from hf_kvret.options import config as options

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNITS = {"k": 1024, "m": 1024**2}
# Generators of torch take no larger seed; one bit is left for sums with a small number.
_LARGEST_SEED = 2**63 - 1

_Value = TypeVar("_Value")


def device_name(text: str) -> str:
    """``cpu``, ``cuda``, or ``cuda:N``: the devices that caches and kernels are made for."""
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", text):
        message = f"{text!r} is no device here: write cpu, cuda, or one of several as cuda:1"
        raise argparse.ArgumentTypeError(message)
    return str(torch.device(text))


def check_device(device: str) -> None:
    """ValueError for a CUDA device that this machine lacks."""
    place, count = torch.device(device), torch.cuda.device_count()
    if place.type != "cuda" or (place.index or 0) < count:
        return
    if not count:
        raise ValueError(f"--device {device}: no CUDA device here; use --device cpu")
    raise ValueError(f"--device {device}: the last CUDA device here is cuda:{count - 1}")


def file_path(text: str) -> Path:
    """A path, ``~`` expanded; an empty one is refused."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty: write the name of a file or folder")
    return Path(text).expanduser()


def budget(text: str) -> int | float:
    """A count from 1, or a share above 0 and at most 1."""
    try:
        value = float(text) if "." in text else int(text)
    except ValueError:
        message = f"{text!r} is neither a count (256) nor a share (0.04)"
        raise argparse.ArgumentTypeError(message) from None
    if value <= 0 or (isinstance(value, float) and value > 1):
        message = f"{text}: a count from 1 (256), or a share above 0 and at most 1.0 (0.04)"
        raise argparse.ArgumentTypeError(message)
    return value


def byte_count(text: str) -> int:
    """``options.byte_count`` for argparse."""
    try:
        return options.byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def lengths(text: str) -> tuple[int, ...]:
    """Comma-separated counts from 1, each with an optional K (1,024) or M."""
    counts = []
    for word in map(str.strip, text.split(",")):
        try:
            counts.append(_count(word))
        except ValueError:
            counts.append(0)
        if counts[-1] < 1:
            message = f"{word!r} is no whole number from 1: write 4096 or 4K"
            raise argparse.ArgumentTypeError(message)
    if len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f"the same number twice in {text!r}: name each once")
    return tuple(counts)


def length(text: str) -> int:
    """One count from 1, as 4096 or 4K."""
    counts = lengths(text)
    if len(counts) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} are several numbers: write one, as 4K")
    return counts[0]


def length_or_none(text: str) -> int:
    """As ``length``, or 0."""
    return 0 if text.strip() == "0" else length(text)


def _count(text: str) -> int:
    """A whole number, as 4096 or 4K; ValueError for anything else."""
    text = text.strip()
    unit = _UNITS.get(text[-1:].lower())
    return int(text) if unit is None else int(text[:-1]) * unit


def names(text: str) -> list[str]:
    """Comma-separated names, blanks dropped."""
    return [name.strip() for name in text.split(",") if name.strip()]


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Whole numbers from ``least``, to ``most`` where given, each with an optional K or M."""
    what = f"whole number from {least}" + ("" if most is None else f" to {most}")
    return _checked(_count, lambda x: x >= least and (most is None or x <= most), what)


def number(above: float, most: float = math.inf) -> Callable[[str], float]:
    """Finite numbers above ``above``, and at most ``most``."""
    what = f"number above {above:g}" + ("" if most == math.inf else f", at most {most:g}")
    return _checked(float, lambda x: above < x <= most and x < math.inf, what)


def share(*, zero: bool = False) -> Callable[[str], float]:
    """Shares below 1 and above 0, or from 0 on."""
    what = f"share {'from' if zero else 'above'} 0, below 1"
    return _checked(float, lambda x: 0 <= x < 1 and (zero or x > 0), what)


def _checked(
    parse: Callable[[str], _Value], holds: Callable[[_Value], bool], what: str
) -> Callable[[str], _Value]:
    """Reads a value for which ``holds`` is true; ``what`` says in an error which these are."""

    def read(text: str) -> _Value:
        try:
            value = parse(text)
        except ValueError:
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
        return value

    return read


def several(parse: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    """Comma-separated values of one type, no one twice."""

    def read(text: str) -> tuple[_Value, ...]:
        values = tuple(parse(word.strip()) for word in text.split(","))
        if len({(type(value), value) for value in values}) < len(values):
            raise argparse.ArgumentTypeError(f"the same value twice in {text!r}: name each once")
        return values

    return read


def one_or_both(one: str, other: str) -> Callable[[str], tuple[str, ...]]:
    """One of two words, or ``both``, as a tuple of words."""

    def read(text: str) -> tuple[str, ...]:
        if text not in (one, other, "both"):
            raise argparse.ArgumentTypeError(f"{text!r}: choose {one}, {other} or both")
        return (one, other) if text == "both" else (text,)

    return read


def known_names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Comma-separated names, each of ``known`` and no one twice; at least one."""
    allowed = tuple(known)

    def read(text: str) -> tuple[str, ...]:
        choices = names(text)
        unknown = [name for name in choices if name not in allowed]
        if unknown or not choices:
            what = f"unknown: {', '.join(unknown)}" if unknown else "none is named"
            raise argparse.ArgumentTypeError(f"{what}; choose among {', '.join(allowed)}")
        if len(set(choices)) < len(choices):
            raise argparse.ArgumentTypeError(f"the same name twice in {text!r}: name each once")
        return tuple(choices)

    return read


seed = whole_number(0, _LARGEST_SEED)
percent = _checked(float, lambda value: 0 <= value <= 100, "percentage from 0 to 100")
