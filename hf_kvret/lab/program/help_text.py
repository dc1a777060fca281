"""How ``--help`` looks: wrapped descriptions, examples as they are typed, every default named."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

# Multiples of this are written with a K, as they are on the command line.
_K = 1024
_WRITTEN = "; default: "


class HelpFormatter(argparse.HelpFormatter):
    """Adds the default to the help of every option that has one.

    An end "; default: ..." of an option's help is of an option without a value, and gives way to
    one that ``set_defaults`` gave later. An option whose help says "default" otherwise is left as
    it is, and so are switches. A text of several lines is not wrapped.
    """

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        if action.nargs == 0 or not action.option_strings:
            return text
        if default is None or default is argparse.SUPPRESS:
            return text
        text = text.partition(_WRITTEN)[0]
        if "default" in text:
            return text
        shown = f"default: {shown_default(default)}".replace("%", "%%")
        return f"{text} ({shown})" if text else shown

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)


def shown_default(value: Any) -> str:
    """A default as one would type it: ``4K,16K``, ``0.1``, ``cpu``."""
    if isinstance(value, list | tuple):
        return ",".join(
            f"{one:g}" if isinstance(one, float) else shown_default(one) for one in value
        )
    if isinstance(value, int) and value >= 2 * _K and value % _K == 0:
        return f"{value // _K}K"
    if isinstance(value, float):
        # A share of 1.0 is all, a count of 1 is one.
        return "1.0" if value == 1 else f"{value:g}"
    return str(value).strip()


def example_lines(examples: Sequence[str]) -> str:
    """An epilog with commands to copy, one a line."""
    return "\n  ".join(["examples:", *examples])
