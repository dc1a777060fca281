"""A small model that takes any cache, for tests of saved caches."""

from __future__ import annotations

from typing import Any

import pytest

from hf_kvret import attach
from hf_kvret.testing import MODELS


@pytest.fixture
def llama() -> Any:
    model = MODELS["llama"].build()
    attach(model)
    return model
