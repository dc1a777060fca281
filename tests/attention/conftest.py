"""A small model, new in each test."""

from __future__ import annotations

from typing import Any

import pytest

from hf_kvret.testing import MODELS


@pytest.fixture
def llama() -> Any:
    return MODELS["llama"].build()
