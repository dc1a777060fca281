"""A small change of the library that some default test must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong with it.
        file: path from the root of the repository.
        right: what stands there, exactly once.
        wrong: what stands there when the fault is planted.
    """

    name: str
    file: str
    right: str
    wrong: str
