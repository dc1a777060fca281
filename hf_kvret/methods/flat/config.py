"""Options of the exact oracle."""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvret.options.config import RetrievalConfig


@dataclass(frozen=True)
class FlatConfig(RetrievalConfig):
    """The oracle has no options of its own."""
