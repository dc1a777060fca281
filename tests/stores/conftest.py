"""A model for the files of this folder."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from hf_kvret.testing import MODELS


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return MODELS["llama"].build()
