"""Type checks of calibration options against their dataclass annotations."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_kinds(options: DataclassInstance) -> None:
    """Check that every field has the type, or one of the types, of its annotation.

    An int is accepted for a float. A bool is not accepted for an int, and numbers of numpy or torch
    are not accepted, because options are saved as JSON.

    Raises:
        TypeError: the field, its value, and what it may be.
    """
    hints = get_type_hints(type(options))
    for field in fields(options):
        value, hint = getattr(options, field.name), hints[field.name]
        kinds: tuple[Any, ...] = get_args(hint) or (hint,)
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            choices = " or ".join("None" if x is type(None) else x.__name__ for x in kinds)
            raise TypeError(
                f"{field.name}={value!r} is of type {type(value).__name__}: pass {choices}"
            )
