"""The small model, its artifact and the hub of the tests of artifacts."""

from __future__ import annotations

from ...artifacts.conftest import artifact, hub, identity, llama, saved

__all__ = ["artifact", "hub", "identity", "llama", "saved"]
