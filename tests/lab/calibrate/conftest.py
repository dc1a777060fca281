"""The small model and its artifact of the tests of artifacts."""

from ...artifacts.conftest import artifact, identity, saved

__all__ = ["artifact", "identity", "saved"]
