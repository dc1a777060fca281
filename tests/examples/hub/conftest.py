"""A small model, and the hub of the tests of artifacts."""

from __future__ import annotations

from ...artifacts.conftest import hub, llama

__all__ = ["hub", "llama"]
