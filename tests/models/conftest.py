"""A small model with latent attention, and a look at the matrices of its projections."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

import hf_kvret
from hf_kvret.models import projection
from hf_kvret.testing import LATENT_MODELS


@pytest.fixture
def model() -> PreTrainedModel:
    """Attached, so that ``model(...)`` takes any cache."""
    built = LATENT_MODELS["deepseek_v3"].build()
    hf_kvret.attach(built)
    return built


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The projections that are asked for their matrix, in order."""
    modules: list[nn.Module] = []
    images = projection._images

    def logged(module: nn.Module, *args: Any) -> projection.Affine:
        modules.append(module)
        return images(module, *args)

    monkeypatch.setattr(projection, "_images", logged)
    return modules
