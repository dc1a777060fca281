"""The small model and its artifact of the tests of artifacts."""

from __future__ import annotations

from ...artifacts.conftest import artifact, identity, llama, saved

__all__ = ["artifact", "identity", "llama", "saved"]
