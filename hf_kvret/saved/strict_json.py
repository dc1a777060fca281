"""JSON from a file that may be damaged, or made to do damage."""

from __future__ import annotations

import json
import math
from typing import Any


def read_json(content: bytes | str, *, allow_nan: bool = False) -> Any:
    """The value that ``content`` says, as ``json.loads``.

    Args:
        content: UTF-8.
        allow_nan: take NaN and infinities, which JSON has no words for.

    Raises:
        ValueError: no UTF-8, no JSON, an integer beyond 64 bits, NaN or infinity, or lists and
            objects that are nested too deep.
    """

    def constant(name: str) -> float:
        if not allow_nan:
            raise ValueError(f"{name} is no number")
        return float(name)

    text = content.decode() if isinstance(content, bytes) else content
    parse_float = float if allow_nan else _finite
    try:
        return json.loads(
            text, parse_int=_integer, parse_float=parse_float, parse_constant=constant
        )
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def plain_bytes(value: Any) -> bytes:
    """JSON in the one form that checksums are made of: sorted names, no spaces, ASCII.

    The same before ``value`` is written to a file and after it is read.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _integer(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{digits[:20]} is beyond 64 bits")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return number
