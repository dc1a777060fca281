"""Shared by tests of kernels."""

from __future__ import annotations

import pytest

from hf_kvret_kernels import host_library as library


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    """An instruction set of the compiled library; skips where this processor lacks it."""
    name: str = request.param
    if name not in library.paths():
        pytest.skip(f"this processor has no {name}")
    return name
