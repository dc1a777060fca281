"""Whether a method's calibration options are of the kinds that its dataclass declares."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_kinds(options: DataclassInstance) -> None:
    """Refuse a field that is not of its annotation, a type or a union of types.

    An int will do for a float. A bool is no int, and numbers of numpy or torch are none, because
    options are saved as JSON.

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
