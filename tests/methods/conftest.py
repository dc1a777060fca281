"""A small model that tests of methods share."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret.testing import MODELS


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """The zoo's Llama with our attention; its weights are not to be changed."""
    model = MODELS["llama"].build()
    hf_kvret.attach(model)
    return model
