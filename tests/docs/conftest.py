"""The hub of the tests of artifacts, for tutorials."""

from __future__ import annotations

from ..artifacts.conftest import hub

__all__ = ["hub"]
