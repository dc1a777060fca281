"""Names of caches with options in one text, as ``paris:top_k=512:store=host``.

A colon stands before each option, and a dot names an entry of an option that is a dictionary:
``paris:prompt.above=0:prompt.top_k=0.25``. Numbers, ``true``, ``false`` and ``none`` are values of
their types, and everything else is text.
"""

from __future__ import annotations

import contextlib
from typing import Any

# Names of an artifact, also those that look like numbers.
_TEXT_OPTIONS = {"artifact", "revision"}


def parse_spec(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options in ``text``.

    Raises:
        ValueError: a word that is no option, or one with both a value and entries.
    """
    name, *words = (word.strip() for word in text.split(":"))
    options = [parse_option(text, word) for word in words]
    result = {key: value for key, value in options if "." not in key}
    for key, value in options:
        outer, dot, inner = key.partition(".")
        if not dot:
            continue
        if not isinstance(result.setdefault(outer, {}), dict):
            raise ValueError(f"{text!r}: {outer} has a value and entries, write one or the other")
        result[outer][inner] = value
    return name, result


def parse_option(text: str, word: str) -> tuple[str, Any]:
    """Name and value of the option ``word`` in ``text``; ValueError where it is none."""
    name, separator, value = word.partition("=")
    if not separator or not name or not value:
        raise ValueError(f"{text!r}: {word!r} is no option, write NAME=VALUE")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    for parse in () if name in _TEXT_OPTIONS else (int, float):
        with contextlib.suppress(ValueError):
            return name, parse(value)
    return name, value
