"""JSON from a file that may be damaged, or made to do damage."""

from __future__ import annotations

import json
import math
from typing import Any

MOST_NESTED = 64
"""Depth of lists and objects in each other. Our own files have less than ten."""

_MOST_DIGITS = 20


def read_json(content: bytes | str, *, allow_nan: bool = False) -> Any:
    """What ``content`` says, as ``json.loads``, but for text that means several things or none.

    Args:
        content: UTF-8.
        allow_nan: take NaN and infinities, which JSON has no words for.

    Raises:
        ValueError: no UTF-8 or no JSON; a name twice in an object, a number beyond 64 bits, NaN or
            infinity, or more than ``MOST_NESTED`` lists and objects in each other.
    """

    def constant(name: str) -> float:
        if not allow_nan:
            raise ValueError(f"{name} is no number")
        return float(name)

    try:
        value = json.loads(
            content,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=constant,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    _check_depth(value)
    return value


def plain_bytes(value: Any) -> bytes:
    """JSON in the one form that checksums are made of: sorted names, no spaces, ASCII.

    The same before ``value`` is written to a file and after it is read.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise ValueError(f"{name[:80]!r} is there twice")
            names.add(name)
    return result


def _integer(digits: str) -> int:
    number = int(digits) if len(digits) <= _MOST_DIGITS else None
    if number is None or not -(2**63) <= number < 2**64:
        raise ValueError(f"{digits[:_MOST_DIGITS]} is beyond 64 bits")
    return number


def _number(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return number


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_NESTED:
            raise ValueError(f"more than {MOST_NESTED} lists and objects are in each other")
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
